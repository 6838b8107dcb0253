"""Acceptance of drafts: one row's estimates, by the source of its drafts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from worker.schedule.ngram_proposer import FORCED, LOOKUP, MODEL, NO_DRAFT, Draft, NgramProposer

_MATCHES = ((16, 0.9), (8, 0.85), (5, 0.65), (3, 0.5), (2, 0.7), (0, 0.45))
"""Pairs of match length and usual acceptance rate of an n-gram draft's first token, measured over many file
edits. Lengths of one or two apply only near the place that the answer has followed before."""
_PRIOR = 0.7
"""Prior acceptance rate of a network's draft tokens, and of forced tokens that are not certain."""
_PRIOR_WEIGHT = 4.0
"""Weight of a prior, in tried tokens."""
_FADING = 0.97
"""Decay of a tried token's weight with each further one."""
VAIN_TRIES = 8
"""Consecutive tries of a source without an accepted token after which it is tried less often."""
EMPTY_LOOKUPS = 32
"""The same for consecutive lookups without a match: one takes the host 1 to 3% of a small model's step."""
SELDOM_TOKENS = 4
"""Interval of rare lookups, in answered tokens."""


class AcceptanceEstimate:
    """Acceptance estimate of one kind of draft.

    `usual`: the usual rate of its kind, 1 if there is none. The share of it expected at first is that of
    `parent`, the estimate of a wider kind, which learns too, or a constant.
    """

    def __init__(
        self,
        usual: float = 1.0,
        prior_weight: float = _PRIOR_WEIGHT,
        parent: AcceptanceEstimate | None = None,
    ) -> None:
        self._usual = usual
        self._prior_weight = prior_weight
        self._parent = parent
        self.reset()

    def reset(self) -> None:
        """Discard all measurements."""
        self.weight = 0.0
        """Weight of the measurements, in tried tokens."""
        self._accepted = 0.0
        self._expected = 0.0
        """Number of tokens that would have been accepted at the usual rates."""

    @property
    def value(self) -> float:
        """Probability, 0 to 1, that a draft token is accepted if all before it were."""
        prior = self._prior_weight * self._prior
        return (self._accepted + prior * self._usual) / (self.weight + self._prior_weight)

    @property
    def share(self) -> float:
        """Accepted tokens over those that would have been accepted at the usual rates."""
        prior = self._prior_weight * self._prior
        return (self._accepted + prior) / (self._expected + self._prior_weight)

    def learn(self, right: int, tried: int, usual: float | None = None) -> None:
        """Record that `right` of `tried` draft tokens were accepted; none after a rejected one was tried.

        `usual`: the usual rate of those, if it is another.
        """
        made = min(right + 1, tried)
        usual = self._usual if usual is None else usual
        fading = _FADING**made
        self.weight = self.weight * fading + made
        self._accepted = self._accepted * fading + right
        self._expected = self._expected * fading + made * usual
        if self._parent:
            self._parent.learn(right, tried, usual)

    @property
    def _prior(self) -> float:
        return min(1.0, self._parent.share) if self._parent else _PRIOR


def expected(acceptance: float, count: int, certain: int = 0) -> float:
    """Return the expected number of accepted tokens among `count`.

    `acceptance`: acceptance probability of a token if all before it were accepted. The first `certain` always
    are.
    """
    sure, left = min(certain, count), max(0, count - certain)
    return float(count) if acceptance >= 1 else sure + acceptance * (1 - acceptance**left) / (1 - acceptance)


class DraftState:
    """Speculation state of one row, current up to `seen` tokens of its answer: its n-gram index, and an
    acceptance estimate for each source of drafts."""

    def __init__(
        self,
        tokens: Sequence[int],
        seen: int = 0,
        *,
        is_forced: bool = False,
        network: AcceptanceEstimate | None = None,
    ) -> None:
        """`tokens`: what drafts are looked up in. `is_forced`: a constraint may force tokens. `network`: the
        draft network's estimate for all rows."""
        self.lookup = NgramProposer(tokens)
        self.seen = seen
        self.is_forced = is_forced
        ngram = AcceptanceEstimate(prior_weight=0.0)
        ngram.learn(1, 2)  # until more is known, half of what is usual
        self._ngram = {length: AcceptanceEstimate(rate, parent=ngram) for length, rate in _MATCHES}
        """By the least match length."""
        self._others = {FORCED: AcceptanceEstimate(), MODEL: AcceptanceEstimate(parent=network)}
        self._vain = 0
        """Consecutive n-gram drafts of which no token was accepted."""
        self._empty = 0
        """Consecutive lookups that found nothing."""

    def is_due(self, length: int) -> bool:
        """Return whether a lookup is due after `length` tokens of the answer."""
        is_seldom = self._vain >= VAIN_TRIES or self._empty >= EMPTY_LOOKUPS
        return not is_seldom or length % SELDOM_TOKENS == 0

    def look_up(self, room: int) -> Draft:
        """Look up a draft of at most `room` tokens; an empty one if no lookup is due."""
        if not self.is_due(self.seen):
            return NO_DRAFT
        draft = self.lookup.propose(room)
        self._empty = 0 if draft.tokens else self._empty + 1
        return draft

    def acceptance(self, source: str, matched: int = 0) -> float:
        """Return the acceptance probability of each uncertain token of a draft, if all before it were
        accepted. `matched`: the match length of an n-gram draft."""
        return self._estimate(source, matched).value

    def expected(self, draft: Draft, count: int) -> float:
        """Return the expected number of accepted tokens among the first `count` of a draft."""
        acceptance = self.acceptance(draft.source, draft.matched)
        return expected(acceptance, min(count, len(draft.tokens)), draft.certain)

    def learn(self, draft: Draft, right: int, tried: int) -> None:
        """Record that `right` of `tried` tokens of a draft were accepted. Certain ones are left out."""
        if draft.source == LOOKUP:
            self._vain = 0 if right else self._vain + 1
        right, tried = right - draft.certain, tried - draft.certain
        if right >= 0 and tried > 0:
            self._estimate(draft.source, draft.matched).learn(right, tried)

    def _estimate(self, source: str, matched: int) -> AcceptanceEstimate:
        if source != LOOKUP:
            return self._others[source]
        return next(estimate for length, estimate in self._ngram.items() if matched >= length)
