"""Who says token by token what an answer may go on with. `worker.guides`.

What must hold: where an answer stands is a function of its tokens alone, so `open` goes through those of a
resumed answer and gives the same masks as if nothing had happened. Some token is always allowed: a body
allows one or has failed, and then `fill` raises. A token that may not have come (forced by somebody else, or
resumed from another grammar) frees what follows, for better nothing is held to than to half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from llguidance import LLMatcher

from worker.grammars.body import Body, allow_any
from worker.grammars.lexicon import Lexicon
from worker.grammars.reading import Markup, Reader
from worker.guides import Foreseen
from worker.output.channels import CONTENT, REASONING

BLANKS_MAX = 4
"""Tokens of white space between a thought and what follows: templates have a line's end or two there."""
CALL = "call"
"""The state of `Markup` in which a call has begun."""


@dataclass(frozen=True, slots=True)
class HeldGrammar:
    """All of an answer but its thoughts is one of `bodies`; a thought may be anything, but not the end.

    `opening`: the state of the format in which the answer begins. `thought`: the tokens by which a model may
    begin a thought itself, before all else; empty: it may not. `has_blanks`: white space is offered behind a
    thought; some is passed over in any case. `is_text`: what is no thought is content, whatever is in it.
    """

    bodies: tuple[LLMatcher, ...]
    lexicon: Lexicon
    markup: Markup
    opening: str = CONTENT
    thought: tuple[int, ...] = ()
    has_blanks: bool = False
    is_text: bool = False

    def open(self, answered: Sequence[int]) -> HeldGuide:
        """See `guides.Grammar`."""
        guide = HeldGuide(self)
        for token in answered:
            guide.saw(token)
        return guide


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """An answer is free, but for its calls: behind the marker that begins one stands `body`."""

    body: LLMatcher
    markup: Markup
    opening: str = CONTENT

    def open(self, answered: Sequence[int]) -> CallGuide:
        """See `guides.Grammar`."""
        guide = CallGuide(self)
        for token in answered:
            guide.saw(token)
        return guide


class _Phase(Enum):
    THOUGHT = auto()
    BEGINNING = auto()
    BODY = auto()
    FREE = auto()


class HeldGuide:
    """`guides.Guide` of a `HeldGrammar`."""

    def __init__(self, grammar: HeldGrammar) -> None:
        self._grammar = grammar
        self._bodies: list[Body] = []
        """What the answer may still be."""
        self._reader: Reader | None = None
        self._opened: int | None = None
        """How many of the tokens that begin a thought have come; None: none begins here."""
        self._blanks = 0
        """How many tokens of white space may still come before the body."""
        if grammar.opening == CONTENT:
            self._begin(may_think=bool(grammar.thought))
        else:
            self._think(grammar.opening)

    def saw(self, token: int) -> None:
        """See `guides.Guide`."""
        match self._phase:
            case _Phase.THOUGHT:
                self._read(token)
            case _Phase.BEGINNING:
                self._advance(token, self._pass(token))
            case _Phase.BODY:
                self._advance(token, is_passed=False)

    def fill(self, mask: memoryview) -> bool:
        """See `guides.Guide`. Raises `GuideError` once a body has failed."""
        if self._phase is _Phase.FREE:
            return False
        lexicon = self._grammar.lexicon
        words = np.frombuffer(mask, np.uint32)
        if self._phase is _Phase.THOUGHT:
            # An answer that ends in its thought would not be what it is held to.
            words[: lexicon.endless_mask.size] = lexicon.endless_mask
            return True
        allow_any(self._bodies, words, lexicon.blank_mask.size)
        if self._phase is _Phase.BEGINNING:
            if self._blanks and self._grammar.has_blanks:
                words[: lexicon.blank_mask.size] |= lexicon.blank_mask
            if self._opened is not None:
                token = self._grammar.thought[self._opened]
                words[token // 32] |= np.uint32(1 << token % 32)
        return True

    def foresee(self, most: int) -> Foreseen:
        """See `guides.Guide`."""
        if self._phase not in (_Phase.BEGINNING, _Phase.BODY) or len(self._bodies) != 1:
            return Foreseen()
        found = self._bodies[0].foresee(most)
        # What may stand before the body is none of it.
        is_sure = self._phase is _Phase.BODY or not (self._blanks or self._opened is not None)
        return found if is_sure else Foreseen(found.tokens)

    def _think(self, state: str) -> None:
        self._phase = _Phase.THOUGHT
        self._reader = self._grammar.markup.open(state, CONTENT)

    def _begin(self, *, may_think: bool, blanks: int = 0) -> None:
        self._phase = _Phase.BEGINNING
        self._bodies = [Body(grammar, self._grammar.lexicon) for grammar in self._grammar.bodies]
        self._opened = 0 if may_think else None
        self._blanks = blanks

    def _read(self, token: int) -> None:
        assert self._reader is not None, "a thought is read"
        rest = self._reader.push(token)
        if rest is None:
            return
        self._begin(may_think=False, blanks=BLANKS_MAX)
        if rest := rest.lstrip(b" \t\r\n"):
            self._phase = _Phase.BODY
            self._keep([body for body in self._bodies if body.take_text(rest)])

    def _pass(self, token: int) -> bool:
        """Whether the token stands before the body, and is none of it."""
        thought = self._grammar.thought
        if self._opened is not None:
            self._opened = self._opened + 1 if thought[self._opened] == token else None
            if self._opened == len(thought):
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

    def _keep(self, bodies: list[Body]) -> None:
        self._bodies = bodies
        if not bodies:
            self._phase = _Phase.FREE


class CallGuide:
    """`guides.Guide` of a `CallGrammar`."""

    def __init__(self, grammar: CallGrammar) -> None:
        self._grammar = grammar
        self._body: Body | None = None
        """Of the call that has begun."""
        self._is_lost = False
        self._reader = grammar.markup.open(grammar.opening, CALL)

    def saw(self, token: int) -> None:
        """See `guides.Guide`."""
        if self._is_lost:
            return
        if self._body is None:
            self._look(token)
        elif not self._body.take([token]):
            self._is_lost, self._body = True, None
        self._close()

    def fill(self, mask: memoryview) -> bool:
        """See `guides.Guide`. Raises `GuideError` once a body has failed."""
        if self._body is None:
            return False
        allow_any([self._body], np.frombuffer(mask, np.uint32), self._grammar.markup.lexicon.blank_mask.size)
        return True

    def foresee(self, most: int) -> Foreseen:
        """See `guides.Guide`."""
        return Foreseen() if self._body is None else self._body.foresee(most)

    def _look(self, token: int) -> None:
        rest = self._reader.push(token)
        if rest is None:
            return
        body = Body(self._grammar.body, self._grammar.markup.lexicon)
        if rest and not body.take_text(rest):
            self._is_lost = True
        else:
            self._body = body

    def _close(self) -> None:
        if self._body is not None and self._body.is_over:
            self._body = None
            self._reader = self._grammar.markup.open(CONTENT, CALL)
