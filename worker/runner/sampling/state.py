"""Sampling state of one request: its settings, its tokens so far, and its forced tokens.

Forced tokens are a function of the output's tokens alone, so they are the same after a restart. Decoding is
double-buffered: when a token is sampled, the host knows all tokens but the one before it. That is enough.
Where the reasoning began is known when its first token is fed, and whether the one unread token closes it is
tested on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from worker.runner.sampling.distribution import mixed
from worker.runner.sampling.grammar_masks import GuidedRow, Masks
from worker.runner.sampling.penalties import TokenCounts, is_penalized
from worker.values import ForcedTokens, SamplingParams, ThinkingBudget


class ForcedToken(NamedTuple):
    """A forced token; not forced if the token before it is one of `unless_after`."""

    token: int
    unless_after: tuple[int, ...] = ()


class ThinkingGuard:
    """Thinking budget of one output: closes reasoning that has used it up. Indices are into the output."""

    def __init__(self, limit: ThinkingBudget, answered: Sequence[int]) -> None:
        self._limit = limit
        self._ends = tuple(token for token in (limit.closing[0], limit.calling) if token is not None)
        self._count = 0
        self._latest: deque[int] = deque(maxlen=len(limit.opening))
        self._due: int | None = limit.tokens if limit.is_open else None
        """Index at which the open reasoning is closed at the latest; None: none is open."""
        self._closed_at: int | None = None
        """Index at which the last reasoning was closed that used up its budget."""
        for token in answered:
            self.accept_token(token)

    def accept_token(self, token: int) -> None:
        """Record the next token of the output."""
        index = self._count
        self._count += 1
        self._latest.append(token)
        if self._due is not None:
            if token in self._ends:
                is_closed = token == self._limit.closing[0] and index == self._due
                self._closed_at = index if is_closed else None
                self._due = None
        elif tuple(self._latest) == self._limit.opening:
            self._due = index + 1 + self._limit.tokens

    def forced(self, index: int) -> ForcedToken | None:
        """Return the forced token at `index`. All tokens but the one before it must have been seen, and none
        behind it."""
        closing = self._limit.closing
        if self._due is not None:
            if index < self._due:
                return None
            if index == self._due:
                return ForcedToken(closing[0], unless_after=self._ends)
            place = index - self._due  # behind a closing token that is certain but not seen yet
        elif self._closed_at is not None:
            place = index - self._closed_at
        else:
            return None
        return ForcedToken(closing[place]) if place < len(closing) else None

    def coming(self) -> tuple[int, ...]:
        """Return the tokens that are forced behind those seen so far: the rest of a closing sequence."""
        if self._due == self._count:
            return self._limit.closing
        return self._limit.closing[self._count - self._closed_at :] if self._closed_at is not None else ()


class SamplingState:
    """A request's sampling state, from its start to its end."""

    def __init__(self, sampling: SamplingParams, tokens: Sequence[int], prompt_tokens: int) -> None:
        """`tokens`: its prompt, the first `prompt_tokens` of them, and its output so far."""
        self.sampling = sampling
        self.seed = mixed(sampling.seed)
        self.counts = TokenCounts(tokens, prompt_tokens) if is_penalized(sampling) else None
        self._prompt_tokens = prompt_tokens
        self._answered = len(tokens) - prompt_tokens
        self._guard = (
            ThinkingGuard(sampling.thinking_budget, tokens[prompt_tokens:])
            if sampling.thinking_budget
            else None
        )
        self._held = (
            GuidedRow(sampling.grammar.open(tokens[prompt_tokens:])) if sampling.grammar is not None else None
        )

    @property
    def failure(self) -> Exception | None:
        """The error of the row's grammar, if it failed."""
        return self._held.failure if self._held else None

    @property
    def may_force(self) -> bool:
        """Whether some token of the row, now or later, may have to differ from the sample."""
        return bool(self.sampling.forced) or self._guard is not None

    def forced(self, position: int) -> ForcedToken | None:
        """Return the forced token at `position` of the sequence, if there is one.

        `accept_token` must have been called for all tokens before the previous one, and may have been for
        that.
        """
        index = position - self._prompt_tokens
        if index < len(self.sampling.forced):
            return ForcedToken(self.sampling.forced[index])
        return self._guard.forced(index) if self._guard else None

    def ask(self, position: int, masks: Masks, place: int) -> None:
        """Write the tokens that the grammar allows at `position` into `masks`; all tokens if one is forced.

        `accept_token` must have been called for all tokens before. Safe in any thread, one at a time.
        """
        if self._held is None or self.forced(position) is not None:
            masks.spare(place)
        else:
            masks.ask(place, self._held)

    def forced_tokens(self, most: int) -> ForcedTokens:
        """Return how the output continues behind the tokens seen, in at most `most` tokens."""
        stands = self.sampling.forced[self._answered :] or (self._guard.coming() if self._guard else ())
        if stands:
            return ForcedTokens(stands[:most], min(most, len(stands)))
        return self._held.forced_tokens(most) if self._held else ForcedTokens()

    def accept_token(self, token: int) -> None:
        """Record the next token of the output."""
        self._answered += 1
        if self._guard:
            self._guard.accept_token(token)
        if self._held:
            self._held.accept_token(token)
