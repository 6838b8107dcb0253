"""One request's way from tokens to the channels of its answer: what it thinks, and what it says.

A model tells its channels apart by markers. What must hold: each channel, joined, is that part of the whole
answer's text, without the markers, the content up to the first stop string in it; no marker is given out, not
even in part, unless it stays a part; and all of that is a function of the tokens alone, so an answer goes on
anywhere as it would have gone on here.

Some markers are special tokens, or have them in them. Those have no text that a client may see, so they stand
in the text as *signs*, half surrogate pairs, which no decoder ever makes: a sign that turns out to belong to
no marker is left out without a trace. So do tokens of which it counts that they are tokens; such a sign turns
back into the token's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from protocol.parts import CallDelta
from worker.contract import Growth
from worker.output.text import StopMatcher, TextStream, Vocabulary

REASONING = "reasoning"
"""The state of a format in which the model thinks, by upstream's name. What any other holds is content."""
CONTENT = "normal"
CALL = "tool"
"""The state in which a tool is called."""
CALLED = "called"
"""What a piece has in the place of a state with which a call is whole."""

Piece = tuple[str, str | CallDelta]
"""What is certain of an answer, without markers, and the state it was said in; of a call, how it grows."""

_QUIET = frozenset([REASONING, CALL])
SIGNS_MAX = 2048
_SIGN_FIRST = 0xD800
_SIGNS = re.compile("[\ud800-\udfff]")


def signs_of(tokens: Iterable[int]) -> dict[int, str]:
    """A sign for each token. Raises `ValueError` if there are more tokens than signs."""
    distinct = sorted({*tokens})
    if len(distinct) > SIGNS_MAX:
        raise ValueError(f"{len(distinct)} special tokens in markers")
    return {token: chr(_SIGN_FIRST + place) for place, token in enumerate(distinct)}


class Machine(Protocol):
    """Where one answer stands in its model's format."""

    state: str

    def split(self, text: str) -> Sequence[Piece]:
        """Go on; what is certain."""

    def rest(self) -> Sequence[Piece]:
        """What was held back as the possible beginning of something else. Call once."""


class Signs(NamedTuple):
    """What stands for tokens: the sign of each, and the text of those that have one."""

    of: Mapping[int, str]
    texts: Mapping[str, str] = {}


class ChannelPipeline:
    """`contract.Pipeline` of a model whose answers have channels."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        machine: Machine,
        signs: Signs,
        stop: Sequence[str],
        *,
        single_call: bool = False,
    ) -> None:
        """`signs`: of the tokens that belong to markers. `stop`: what ends the content. `single_call`: so
        does the first call that is whole."""
        self.stopped = False
        self.reasoning_tokens = 0
        self.has_called = False
        self._vocabulary = vocabulary
        self._machine = machine
        self._signs = signs.of
        self._texts = signs.texts
        self._stream = TextStream(vocabulary)
        self._matcher = StopMatcher(stop)
        self._single_call = single_call
        # Tokens of a thought that may be those of a call.
        self._undecided_tokens = 0

    @property
    def stop_string(self) -> str:
        """See `contract.Pipeline`."""
        return self._matcher.found

    def push(self, token: int) -> Growth:
        """See `contract.Pipeline`."""
        if self.stopped:
            return Growth()
        machine = self._machine
        was_thinking = machine.state == REASONING
        sign = self._signs.get(token)
        text = self._stream.push(token) if sign is None else self._stream.settle() + sign
        pieces = machine.split(text) if text else ()
        state = machine.state
        if state in _QUIET or was_thinking:
            self._count_thought(state, was_thinking)
            is_content = False
        else:
            is_content = sign is None
        if len(pieces) == 1 and sign is None:  # as most are
            state, grown = pieces[0]
            return self._grown(state, grown, is_content)
        return self._sorted(pieces, is_content)

    def flush(self) -> Growth:
        """See `contract.Pipeline`. A marker or a stop string may show itself only here. Call once."""
        if self.stopped:
            return Growth()
        pieces = [*self._machine.split(self._stream.rest()), *self._machine.rest()]
        growth = self._sorted(pieces, is_content=True)
        return growth if self.stopped else growth.then(Growth(self._matcher.rest()))

    def spell(self, token: int) -> bytes:
        """See `contract.Pipeline`."""
        return self._vocabulary.spell(token)

    def _count_thought(self, state: str, was_thinking: bool) -> None:
        """What looks like a call within a thought, and is none, is a part of it."""
        if state == CALL:
            self._undecided_tokens += was_thinking or self._undecided_tokens > 0
            return
        if state == REASONING and (was_thinking or self._undecided_tokens):
            self.reasoning_tokens += 1 + self._undecided_tokens
        self._undecided_tokens = 0

    def _sorted(self, pieces: Iterable[Piece], is_content: bool) -> Growth:
        growth = Growth(is_content=is_content)
        for state, grown in pieces:
            if not self.stopped:
                growth = growth.then(self._grown(state, grown, is_content))
        return growth

    def _grown(self, state: str, grown: str | CallDelta, is_content: bool) -> Growth:
        if isinstance(grown, CallDelta):
            return self._called(state, grown)
        text = self._shown(grown)
        if state == REASONING:
            return Growth("", text, is_content)
        certain = self._matcher.push(text)
        self.stopped = self._matcher.matched
        return Growth(certain, "", is_content)

    def _called(self, state: str, grown: CallDelta) -> Growth:
        self._undecided_tokens = 0
        if not grown.arguments.isascii():
            arguments = _SIGNS.sub(self._text_of, grown.arguments)
            grown = replace(grown, arguments=arguments)
        if state == CALLED:
            self.has_called = True
            self.stopped = self._single_call
        return Growth(self._matcher.rest() if self.stopped else "", "", False, (grown,))

    def _shown(self, text: str) -> str:
        """With no sign left in it."""
        return _SIGNS.sub(self._text_of, text) if self._signs and not text.isascii() else text

    def _text_of(self, sign: re.Match[str]) -> str:
        return self._texts.get(sign[0], "")
