"""Acceptance of drafts: one row's estimates, by the source of its drafts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.schedule.ngram_proposer import FORCED, MODEL, NO_DRAFT, Draft, NgramProposer

_MATCHES = ((16, 0.9), (8, 0.85), (5, 0.65), (3, 0.5), (2, 0.7), (0, 0.45))
"""Pairs of match length and acceptance rate of a draft's first token, measured over many file edits.
Lengths of one or two apply only near the place that the answer has followed before."""
_PRIOR = 0.7
"""Prior acceptance rate of a network's draft tokens, and of forced tokens that are not certain."""
_PRIOR_WEIGHT = 4.0
"""Weight of a prior rate, in tried tokens."""
_FADING = 0.97
"""Decay of a tried token's weight with each further one."""
VAIN_TRIES = 8
"""Consecutive tries of a source without an accepted token after which it is tried less often."""
EMPTY_LOOKUPS = 32
"""The same for consecutive lookups without a match: one takes the host 1 to 3% of a small model's step."""
SELDOM_TOKENS = 4
"""Interval of rare lookups, in answered tokens."""


@dataclass(slots=True)
class AcceptanceRate:
    """Acceptance rate of one kind of draft. `usual`: the prior; `shared`: the rate of all rows, whose current
    value is the prior instead, and which learns with this one."""

    usual: float = _PRIOR
    shared: AcceptanceRate | None = None
    _tries: float = 0.0
    _hits: float = 0.0

    @property
    def value(self) -> float:
        """Probability, 0 to 1, that a draft token is accepted if all before it were."""
        return self.after(self.shared.value if self.shared else self.usual)

    def after(self, usual: float) -> float:
        """Return `value` with `usual` as the prior."""
        return (self._hits + _PRIOR_WEIGHT * usual) / (self._tries + _PRIOR_WEIGHT)

    def learn(self, right: int, tried: int) -> None:
        """Record that `right` of `tried` draft tokens were accepted; none after a rejected one was tried."""
        made = min(right + 1, tried)
        self.fade(_FADING**made)
        self._tries += made
        self._hits += right
        if self.shared:
            self.shared.learn(right, tried)

    def fade(self, share: float) -> None:
        """Scale the weight of all measurements by `share`."""
        self._tries *= share
        self._hits *= share


def expected(acceptance: float, count: int, certain: int = 0) -> float:
    """Return the expected number of accepted tokens among `count`.

    `acceptance`: acceptance probability of a token if all before it were accepted. The first `certain` always
    are.
    """
    sure, left = min(certain, count), max(0, count - certain)
    return float(count) if acceptance >= 1 else sure + acceptance * (1 - acceptance**left) / (1 - acceptance)


@dataclass(slots=True)
class AcceptanceEstimate:
    """Acceptance estimate of n-gram drafts for one row. Results of one match length also scale the others,
    until those are tried."""

    _rates: dict[int, AcceptanceRate] = field(default_factory=dict)
    """By the least match length."""
    _hits: float = 1.0
    _expected: float = 2.0
    """Twice the hits at first: a new row's drafts are expected to be accepted half as often as usual."""

    def of(self, matched: int) -> float:
        """Return the probability, 0 to 1, that the next token after a match of this length is accepted."""
        rate = self._rate(matched)
        return rate.after(rate.usual * min(1.0, self._hits / self._expected))

    def learn(self, matched: int, right: int, tried: int) -> None:
        """Record that `right` of `tried` draft tokens were accepted after a match of `matched` tokens."""
        rate, made = self._rate(matched), min(right + 1, tried)
        rate.learn(right, tried)
        self._hits = self._hits * _FADING**made + right
        self._expected = self._expected * _FADING**made + made * rate.usual

    def _rate(self, matched: int) -> AcceptanceRate:
        least, usual = next(match for match in _MATCHES if matched >= match[0])
        rate = self._rates.get(least)
        if rate is None:
            rate = self._rates[least] = AcceptanceRate(usual)
        return rate


@dataclass(slots=True)
class DraftState:
    """Speculation state of one row, current up to `seen` tokens of its answer: its n-gram index, and one
    acceptance estimate for each source of drafts.

    `is_forced`: a constraint may force tokens; `forced` is the acceptance rate of those that are not certain.
    """

    lookup: NgramProposer
    network: AcceptanceRate
    seen: int = 0
    is_forced: bool = False
    ngram: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    forced: AcceptanceRate = field(default_factory=AcceptanceRate)
    vain: int = 0
    """Consecutive n-gram drafts of which no token was accepted."""
    empty: int = 0
    """Consecutive lookups that found nothing."""
    has_begun: bool = False
    """The draft network has begun with the row."""

    def is_due(self, length: int) -> bool:
        """Return whether a lookup is due after `length` tokens of the answer."""
        is_seldom = self.vain >= VAIN_TRIES or self.empty >= EMPTY_LOOKUPS
        return not is_seldom or length % SELDOM_TOKENS == 0

    def look_up(self, room: int) -> Draft:
        """Look up a draft of at most `room` tokens; an empty one if no lookup is due."""
        if not self.is_due(self.seen):
            return NO_DRAFT
        draft = self.lookup.propose(room)
        self.empty = 0 if draft.tokens else self.empty + 1
        return draft

    def acceptance_of(self, draft: Draft) -> float:
        """Return the acceptance probability of each uncertain token, if all before it were accepted."""
        if draft.source == MODEL:
            return self.network.value
        return self.forced.value if draft.source == FORCED else self.ngram.of(draft.matched)

    def expected(self, draft: Draft, count: int) -> float:
        """Return the expected number of accepted tokens among the first `count` of a draft."""
        return expected(self.acceptance_of(draft), min(count, len(draft.tokens)), draft.certain)

    def learn(self, draft: Draft, right: int, tried: int) -> None:
        """Record that `right` of `tried` tokens of a draft were accepted. Certain ones are left out."""
        if draft.source == MODEL:
            self.network.learn(right, tried)
        elif draft.source != FORCED:
            self.vain = 0 if right else self.vain + 1
            self.ngram.learn(draft.matched, right, tried)
        elif right >= draft.certain and tried > draft.certain:
            self.forced.learn(right - draft.certain, tried - draft.certain)
