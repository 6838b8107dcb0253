"""One request's way from tokens to the channels of its answer: what it thinks, and what it says.

A model tells its channels apart by markers. What must hold: each channel, joined, is that part of the whole
answer's text, without the markers, the content up to the first stop string in it; no marker is given out, not
even in part, unless it stays a part; and all of that is a function of the tokens alone, so an answer goes on
anywhere as it would have gone on here.

Some markers are special tokens, or have them in them. Those have no text that a client may see, so they stand
in the text as *signs*, half surrogate pairs, which no decoder ever makes: a sign that turns out to belong to
no marker is left out without a trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from worker.contract import Growth
from worker.output.text import StopMatcher, TextStream, Vocabulary

REASONING = "reasoning"
"""The state of a format in which the model thinks, by upstream's name. What any other holds is content."""
CONTENT = "normal"

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

    def split(self, text: str) -> Sequence[tuple[str, str]]:
        """Go on; what is certain of the text, without markers, each piece with the state it was said in."""

    def rest(self) -> str:
        """What was held back as the possible beginning of a marker. Call once."""


class ChannelPipeline:
    """`contract.Pipeline` of a model whose answers have channels."""

    def __init__(
        self, vocabulary: Vocabulary, machine: Machine, signs: Mapping[int, str], stop: Sequence[str]
    ) -> None:
        """`signs`: of the special tokens that belong to markers. `stop`: what ends the content."""
        self.stopped = False
        self.reasoning_tokens = 0
        self.has_called = False
        self._vocabulary = vocabulary
        self._machine = machine
        self._signs = signs
        self._stream = TextStream(vocabulary)
        self._matcher = StopMatcher(stop)

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
        thinks = machine.state == REASONING
        if thinks and was_thinking:
            self.reasoning_tokens += 1
        is_content = sign is None and not thinks and not was_thinking
        if len(pieces) == 1 and sign is None:  # as most are
            state, text = pieces[0]
            return self._grown(state, text, is_content)
        return self._sorted(pieces, is_content)

    def flush(self) -> Growth:
        """See `contract.Pipeline`. A marker or a stop string may show itself only here. Call once."""
        if self.stopped:
            return Growth()
        pieces = [*self._machine.split(self._stream.rest()), (self._machine.state, self._machine.rest())]
        growth = self._sorted(pieces, is_content=True)
        return growth if self.stopped else growth.then(Growth(self._matcher.rest()))

    def spell(self, token: int) -> bytes:
        """See `contract.Pipeline`."""
        return self._vocabulary.spell(token)

    def _sorted(self, pieces: Iterable[tuple[str, str]], is_content: bool) -> Growth:
        growth = Growth(is_content=is_content)
        for state, text in pieces:
            if not self.stopped:
                growth = growth.then(self._grown(state, text, is_content))
        return growth

    def _grown(self, state: str, text: str, is_content: bool) -> Growth:
        if self._signs and not text.isascii():
            text = _SIGNS.sub("", text)
        if state == REASONING:
            return Growth("", text, is_content)
        certain = self._matcher.push(text)
        self.stopped = self._matcher.matched
        return Growth(certain, "", is_content)
