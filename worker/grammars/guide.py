"""Guides: token masks of structured output, token by token. Implements `Guide` of `worker.values`.

Invariants: the state of a guide depends on the answer's tokens alone, so `open` replays those of a resumed
answer and yields the same masks. Some token is always allowed: a matcher allows one or has failed, and then
`fill` raises. After a disallowed token (forced from outside, or resumed from another grammar) the rest of
the answer is unconstrained, because half a constraint is worse than none.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from worker.grammars.jump_forward import FORESEE_S_MAX, SAID_BYTES_MAX, forced_tokens
from worker.grammars.tokenizer import GrammarTokenizer
from worker.output.channels import CALL, CONTENT, REASONING, Edges, Transitions, TransitionScanner, signs_of
from worker.values import ForcedTokens, GuideError

BLANKS_MAX = 4
"""Maximum white-space tokens between reasoning and content: templates have one or two line breaks there."""

SLOW_S = 0.1
"""CPU time in seconds above which a token or a mask is slow; a hundredth of it is usual."""
SLOW_MAX = 5
"""Number of consecutive slow calls that are tolerated."""
OPAQUE_LOOKS = 3
"""Number of consecutive slow searches for forced tokens after which they stop. A single one may be due to the
garbage collector."""

Words = NDArray[np.uint32]
"""A token mask: bit t % 32 of word t // 32 belongs to token t."""


class Matcher:
    """Grammar matcher: one answer's copy of a compiled grammar, with its state.

    llguidance bounds the cost of one mask, but with an ambiguous grammar the cost per token grows with the
    length of the answer, without limit. So time is measured: a matcher that is slow for several consecutive
    tokens has failed, like one that llguidance gives up. CPU time of the thread is measured, so machine load
    has no effect.
    """

    def __init__(self, grammar: LLMatcher, lexicon: GrammarTokenizer) -> None:
        self._matcher = grammar.deep_copy()
        self._lexicon = lexicon
        self._slow = 0
        self._said = b""
        """The end of the answer at the last search for forced tokens."""
        self._unsaid: list[int] = []
        """Tokens since then."""
        self._opaque = 0
        """Number of consecutive slow searches for forced tokens."""

    @property
    def is_over(self) -> bool:
        """Whether only the end of the answer can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def may_take(self, token: int) -> bool:
        """Whether the token may come next."""
        return bool(self._timed(self._matcher.validate_tokens, [token]))

    def take(self, tokens: Sequence[int]) -> bool:
        """Advance by `tokens`; return whether they are allowed. A failed matcher accepts anything until
        `allow` raises."""
        if self._has_failed():
            return True
        taken = self._timed(self._matcher.try_consume_tokens, [*tokens])
        self._unsaid += tokens
        return taken == len(tokens) or self._has_failed()

    def take_text(self, text: bytes) -> bool:
        """Advance by bytes, like `take`. Incomplete characters are not accepted."""
        tokens = self._lexicon.tokens_of(text)
        return b"".join(map(self._lexicon.spell, tokens)) == text and self.take(tokens)

    def allow(self, words: Words) -> None:
        """Write the mask of allowed tokens to `words`. Raises `GuideError` if the matcher has failed."""
        if not self._has_failed():
            self._timed(self._matcher.unsafe_compute_mask_ptr, words.ctypes.data, words.nbytes)
        if self._has_failed():  # `words` then allows the end of the answer, wrongly
            error = self._matcher.get_error().replace("<non-verbose/>", "").strip()
            error = "it allows no next token" if "NoExtension" in error else error
            raise GuideError(error or f"it takes more than {SLOW_S:g} s per token")

    def forced_tokens(self, most: int) -> ForcedTokens:
        """Return at most `most` forced tokens."""
        if self._has_failed() or self._opaque >= OPAQUE_LOOKS:
            return ForcedTokens()
        began = time.thread_time()
        more = b"".join(map(self._lexicon.spell, self._unsaid))
        self._said, self._unsaid = (self._said + more)[-SAID_BYTES_MAX:], []
        found = forced_tokens(self._matcher, self._lexicon, self._said, most)
        is_slow = time.thread_time() - began > 2 * FORESEE_S_MAX
        self._opaque = self._opaque + 1 if is_slow else 0
        return found

    def _has_failed(self) -> bool:
        return self._slow > SLOW_MAX or self._matcher.is_error()

    def _timed(self, work: Any, *arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return work(*arguments)
        finally:
            is_slow = time.thread_time() - began > SLOW_S
            self._slow = self._slow + 1 if is_slow else 0


def allow_any(bodies: Sequence[Matcher], words: Words, size: int) -> None:
    """Write the union of the matchers' masks to the first `size` words, and clear the rest."""
    words[size if bodies else 0 :] = 0
    if bodies:
        bodies[0].allow(words[:size])
    for body in bodies[1:]:
        other = np.empty(size, np.uint32)
        body.allow(other)
        words[:size] |= other


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """Grammar of a whole answer: its content matches one of `bodies`. Reasoning is free but cannot end it.

    `opening`: the state in which the answer begins. `hidden`: the tokens by which the model itself may begin
    reasoning at the start; empty: it may not. `has_blanks`: allow white space after reasoning; some is
    accepted in any case. `is_text`: everything but reasoning is content, even if it looks like a tool call.
    `relaxed`: keywords of its JSON schema that the content may violate.
    """

    bodies: tuple[LLMatcher, ...]
    lexicon: GrammarTokenizer
    markup: Markup
    opening: str = CONTENT
    hidden: tuple[int, ...] = ()
    has_blanks: bool = False
    is_text: bool = False
    relaxed: tuple[str, ...] = ()

    def open(self, answered: Sequence[int]) -> AnswerGuide:
        guide = AnswerGuide(self)
        for token in answered:
            guide.accept_token(token)
        return guide


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Grammar of tool calls only: `body` applies behind the marker that begins a call; all else is free."""

    body: LLMatcher
    markup: Markup
    opening: str = CONTENT

    def open(self, answered: Sequence[int]) -> CallGuide:
        guide = CallGuide(self)
        for token in answered:
            guide.accept_token(token)
        return guide


class _Phase(Enum):
    THOUGHT = auto()
    BEGINNING = auto()
    BODY = auto()
    FREE = auto()


class AnswerGuide:
    """Guide of an `AnswerGrammar`."""

    def __init__(self, grammar: AnswerGrammar) -> None:
        self._grammar = grammar
        self._bodies: list[Matcher] = []
        """Matchers that the answer may still satisfy."""
        self._reader: TriggerScanner | None = None
        self._opened: int | None = None
        """Number of `hidden` tokens that have come; None: reasoning cannot begin here."""
        self._blanks = 0
        """Number of white-space tokens that may still come before the content."""
        if grammar.opening == CONTENT:
            self._begin(may_think=bool(grammar.hidden))
        else:
            self._think(grammar.opening)

    def accept_token(self, token: int) -> None:
        match self._phase:
            case _Phase.THOUGHT:
                self._read(token)
            case _Phase.BEGINNING:
                self._advance(token, self._pass(token))
            case _Phase.BODY:
                self._advance(token, is_passed=False)

    def fill(self, mask: memoryview) -> bool:
        """Write the mask of allowed tokens. Raises `GuideError` once a matcher has failed."""
        if self._phase is _Phase.FREE:
            return False
        lexicon = self._grammar.lexicon
        words = np.frombuffer(mask, np.uint32)
        if self._phase is _Phase.THOUGHT:
            # An answer that ends during reasoning would not match the grammar.
            words[: lexicon.endless_mask.size] = lexicon.endless_mask
            return True
        allow_any(self._bodies, words, lexicon.blank_mask.size)
        if self._phase is _Phase.BEGINNING:
            if self._blanks and self._grammar.has_blanks:
                words[: lexicon.blank_mask.size] |= lexicon.blank_mask
            if self._opened is not None:
                token = self._grammar.hidden[self._opened]
                words[token // 32] |= np.uint32(1 << token % 32)
        return True

    def forced_tokens(self, most: int) -> ForcedTokens:
        if self._phase not in (_Phase.BEGINNING, _Phase.BODY) or len(self._bodies) != 1:
            return ForcedTokens()
        found = self._bodies[0].forced_tokens(most)
        # White space or reasoning may still come before the content.
        is_sure = self._phase is _Phase.BODY or not (self._blanks or self._opened is not None)
        return found if is_sure else ForcedTokens(found.tokens)

    def _think(self, state: str) -> None:
        self._phase = _Phase.THOUGHT
        self._reader = self._grammar.markup.open(state, CONTENT)

    def _begin(self, *, may_think: bool, blanks: int = 0) -> None:
        self._phase = _Phase.BEGINNING
        self._bodies = [Matcher(grammar, self._grammar.lexicon) for grammar in self._grammar.bodies]
        self._opened = 0 if may_think else None
        self._blanks = blanks

    def _read(self, token: int) -> None:
        assert self._reader is not None, "reasoning is scanned"
        rest = self._reader.push(token)
        if rest is None:
            return
        self._begin(may_think=False, blanks=BLANKS_MAX)
        if rest := rest.lstrip(b" \t\r\n"):
            self._phase = _Phase.BODY
            self._keep([body for body in self._bodies if body.take_text(rest)])

    def _pass(self, token: int) -> bool:
        """Whether the token comes before the content and does not belong to it."""
        hidden = self._grammar.hidden
        if self._opened is not None:
            self._opened = self._opened + 1 if hidden[self._opened] == token else None
            if self._opened == len(hidden):
                self._think(REASONING)
                return True
        elif self._blanks and token in self._grammar.lexicon.blanks:
            self._blanks -= 1
            return not any(body.may_take(token) for body in self._bodies)
        return False

    def _advance(self, token: int, is_passed: bool) -> None:
        if is_passed:
            return
        kept = [body for body in self._bodies if body.take([token])]
        if self._opened is None:
            self._phase, self._blanks = _Phase.BODY, 0
            self._keep(kept)
        else:
            self._bodies = kept

    def _keep(self, bodies: list[Matcher]) -> None:
        self._bodies = bodies
        if not bodies:
            self._phase = _Phase.FREE


class CallGuide:
    """Guide of a `CallGrammar`."""

    def __init__(self, grammar: CallGrammar) -> None:
        self._grammar = grammar
        self._body: Matcher | None = None
        """Matcher of the current call."""
        self._is_lost = False
        self._reader = grammar.markup.open(grammar.opening, CALL)

    def accept_token(self, token: int) -> None:
        if self._is_lost:
            return
        if self._body is None:
            self._look(token)
        elif not self._body.take([token]):
            self._is_lost, self._body = True, None
        self._close()

    def fill(self, mask: memoryview) -> bool:
        """Write the mask of allowed tokens. Raises `GuideError` once a matcher has failed."""
        if self._body is None:
            return False
        allow_any([self._body], np.frombuffer(mask, np.uint32), self._grammar.markup.lexicon.blank_mask.size)
        return True

    def forced_tokens(self, most: int) -> ForcedTokens:
        return ForcedTokens() if self._body is None else self._body.forced_tokens(most)

    def _look(self, token: int) -> None:
        rest = self._reader.push(token)
        if rest is None:
            return
        body = Matcher(self._grammar.body, self._grammar.markup.lexicon)
        if rest and not body.take_text(rest):
            self._is_lost = True
        else:
            self._body = body

    def _close(self) -> None:
        if self._body is not None and self._body.is_over:
            self._body = None
            self._reader = self._grammar.markup.open(CONTENT, CALL)


class Markup:
    """Markers of one model's answers. Immutable and shared."""

    def __init__(self, edges: Edges, lexicon: GrammarTokenizer) -> None:
        used = "\n".join(marker for leaving in edges.values() for marker, _ in leaving)
        tokens = {token: name for name, token in lexicon.names.items() if name in used}
        self.lexicon = lexicon
        self.signs = signs_of(tokens)
        self.transitions = Transitions(edges, {tokens[token]: sign for token, sign in self.signs.items()})

    def open(self, state: str, target: str) -> TriggerScanner:
        """Return a scanner for an answer in `state` that waits for the state `target`."""
        return TriggerScanner(self, state, target)


class TriggerScanner:
    """Scanner of one answer's tokens until the state `target` begins."""

    def __init__(self, markup: Markup, state: str, target: str) -> None:
        self._markup = markup
        self._target = target
        self._scanner = TransitionScanner(markup.transitions, state)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> bytes | None:
        """Add a token; return its bytes behind the marker that begins the target; None: not reached yet."""
        _, rest = self._scanner.scan(self._text(token))
        while rest is not None:
            if self._scanner.state == self._target:
                partial, _ = self._decoder.getstate()
                return rest.encode(errors="ignore") + partial
            _, rest = self._scanner.scan(rest)
        return None

    def _text(self, token: int) -> str:
        sign = self._markup.signs.get(token)
        if sign is None:
            return self._decoder.decode(self._markup.lexicon.spell(token))
        return self._decoder.decode(b"", final=True) + sign
