"""Sampling state of one request: its settings, its tokens so far, and its forced tokens."""

from __future__ import annotations

from collections.abc import Sequence

from worker.contract.engine import SamplingParams
from worker.contract.guides import ForcedTokens
from worker.engine.sampling.distribution import mixed
from worker.engine.sampling.forcing import ForcedToken, ThinkingGuard
from worker.engine.sampling.grammar_masks import GuidedRow, Masks
from worker.engine.sampling.penalties import TokenCounts, is_penalized


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
