"""How often drafts are right, and what a step costs that tries them. Pure: measured seconds are handed in."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import InitVar, dataclass, field
from functools import partial

from worker.drafts import PRICED_COLUMNS

_MATCHES = ((16, 0.9), (8, 0.85), (5, 0.65), (3, 0.5), (2, 0.7), (0, 0.45))
"""From so many equal tokens before it, how often a draft's first token was right over many edits of files.
One or two count only near to where the answer went along before."""
_KINDS = tuple(
    next(kind for kind, (least, _) in enumerate(_MATCHES) if matched >= least)
    for matched in range(_MATCHES[0][0] + 1)
)
"""Of a match of so many tokens: its place among these."""
HELD_TO = 0.7
"""The same of drafts made of what an answer is held to, but for what is certain of them."""
_PRIOR = 4.0
"""What that counts for, in tries."""
_DOUBT = 1.0
"""A row of which nothing is known yet is expected to be right half as often as is usual; that counts for as
much as so many hits."""
_FADING = 0.97
"""Of what a try counts for, so much is left at the next."""
_PRICE_USUAL = 0.25
"""What a column adds to a step, in plain steps, where nothing at all has been measured."""
_SHARE_MIN = 0.01
LAPS_KEPT = 7
"""Of each kind of step so many of the last are remembered. Their median counts: now and then the machine is
busy, and a step takes many times as long."""
_OPTIMISM = 0.5
"""A guess is taken to cost so much of what is told, until it is measured: only what is tried is known."""
COST_MIN = 1.02
"""No step with drafts is quicker than a plain one: where it seems so, the machine was busy meanwhile."""
GUESSED_LAPS = 4
"""Before a step with guesses is believed to be dearer than usual, so many have been measured."""
DOUBTS = 2
"""Of prices that are learned anew, so many are learned by few columns."""
PLAIN_LAPS = 4
"""Before anything is compared with a plain step, so many have been measured."""


@dataclass(slots=True)
class Rate:
    """How often drafts of one kind are right. `usual`: while few have been tried; `like`: as often as those,
    as it is known by now."""

    usual: float
    like: Rate | None = None
    _tries: float = 0.0
    _hits: float = 0.0

    @property
    def value(self) -> float:
        """How likely the next token of such a draft is right, if all before it are; 0 to 1."""
        return self.after(self.like.value if self.like else self.usual)

    def after(self, usual: float) -> float:
        """As `value`, with another expectation to begin with."""
        return (self._hits + _PRIOR * usual) / (self._tries + _PRIOR)

    def learn(self, right: int, tried: int) -> None:
        """Of so many drafted tokens so many were right; behind a wrong one nothing was tried."""
        made = min(right + 1, tried)
        self.fade(_FADING**made)
        self._tries += made
        self._hits += right

    def fade(self, share: float) -> None:
        """What is known counts for so much of what it counted."""
        self._tries *= share
        self._hits *= share


def expected(odds: float, count: int, certain: int = 0) -> float:
    """Tokens of so many that are right, where each is so likely right if all before it are, the first few
    certainly."""
    sure, left = min(certain, count), max(0, count - certain)
    return float(count) if odds >= 1 else sure + odds * (1 - odds**left) / (1 - odds)


@dataclass(slots=True)
class Odds:
    """Of what is looked up for one row. What one kind of match teaches holds for the others, too, until they
    have been tried."""

    _rates: dict[int, Rate] = field(default_factory=dict)
    _hits: float = _DOUBT
    _expected: float = 2 * _DOUBT

    def of(self, matched: int) -> float:
        """How likely the next token of a draft is right that so many equal tokens stand before; 0 to 1."""
        rate = self._rate(matched)
        return rate.after(rate.usual * min(1.0, self._hits / self._expected))

    def learn(self, matched: int, right: int, tried: int) -> None:
        """As `Rate.learn`."""
        rate, made = self._rate(matched), min(right + 1, tried)
        rate.learn(right, tried)
        self._hits = self._hits * _FADING**made + right
        self._expected = self._expected * _FADING**made + made * rate.usual

    def _rate(self, matched: int) -> Rate:
        kind = _KINDS[min(matched, len(_KINDS) - 1)]
        rate = self._rates.get(kind)
        if rate is None:
            rate = self._rates[kind] = Rate(_MATCHES[kind][1])
        return rate


@dataclass(slots=True)
class Median:
    """Of the last measurements; of an even number the lower one in the middle."""

    value: float = 0.0
    _last: deque[float] = field(default_factory=partial(deque, maxlen=LAPS_KEPT))

    @classmethod
    def of(cls, first: float) -> Median:
        """Of this one, so far."""
        median = cls()
        median.learn(first)
        return median

    def __len__(self) -> int:
        return len(self._last)

    def learn(self, measured: float) -> None:
        self._last.append(measured)
        self.value = statistics.median_low(self._last)


@dataclass(slots=True)
class Costs:
    """What steps cost in terms of plain ones, by how many rows and columns they have, and how many tokens a
    network guessed for each row. `told`: what its pass costs, until it is measured; `block`: so many it
    guesses in one. `column_price`: see `contract.Model`.

    A step that drafts were tried in costs one plain step and, for each column behind the first, its price: as
    it was in steps like it, else in those most like it, by their rows first.
    """

    told: float = 0.0
    block: int = 1
    column_price: InitVar[float | None] = None
    _shares: Median = field(default_factory=Median)
    _plain: dict[int, Median] = field(default_factory=dict)
    """Seconds of plain steps, by rows."""
    _laps: dict[int, int] = field(default_factory=dict)
    """How many of them have been measured."""
    _prices: dict[tuple[int, int], Median] = field(default_factory=dict)
    """By rows and columns: what each column behind the first added, in plain steps."""
    _doubts: int = 0
    """So many prices are to be learned before one is known again."""
    _guessed: dict[tuple[int, int, int], Median] = field(default_factory=dict)
    """Seconds of steps with guesses."""

    def __post_init__(self, column_price: float | None) -> None:
        if column_price is not None:
            self._prices[_step(1), _step(PRICED_COLUMNS)] = Median.of(column_price)

    @property
    def share(self) -> float:
        """What a pass costs."""
        return self._shares.value if self.is_share_known else _OPTIMISM * self.told

    @property
    def is_share_known(self) -> bool:
        return len(self._shares) > 0

    def of(self, rows: int, columns: int, guesses: int = 0) -> float:
        """What such a step takes in terms of a plain one; infinite where that has not been measured."""
        plain = self.plain(rows)
        if not plain or not self.knows(rows):
            return math.inf
        usual = self._fed(rows, columns) + self.share * self._passes(guesses)
        known = self._guessed.get((_step(rows), _step(columns), guesses))
        if known is None:
            return max(COST_MIN, usual)
        cost = max(COST_MIN, known.value / plain)
        # The first times something is compiled, or buffers grow.
        return cost if len(known) >= GUESSED_LAPS else min(cost, usual)

    def knows(self, rows: int) -> bool:
        """What a plain step of so many rows takes has been measured."""
        return self._laps.get(_step(rows), 0) >= PLAIN_LAPS

    def knows_price(self, rows: int) -> bool:
        """And what columns add to it."""
        return not self._doubts and any(known == _step(rows) for known, _ in self._prices)

    def plain(self, rows: int) -> float:
        """Seconds of a plain step; 0 where none has been measured."""
        known = self._plain.get(_step(rows))
        return known.value if known else 0.0

    def doubt_prices(self) -> None:
        """What columns add is to be learned anew: the machine may have been busy."""
        self._prices, self._doubts = {}, DOUBTS

    def forget_guessed(self) -> None:
        """What steps take whose drafts a network guesses is to be measured anew."""
        self._guessed, self._shares = {}, Median()

    def forget(self, rows: int) -> None:
        """What a plain step of so many rows takes is to be measured anew."""
        self._laps[_step(rows)] = 0

    def learn(self, rows: int, columns: int, seconds: float, guesses: int = 0) -> None:
        """Such a step took so long. 0 columns: a plain one; with guesses, one beside which they were made."""
        plain = self.plain(rows)
        if guesses:
            share = (seconds / (plain or seconds) - self._fed(rows, columns)) / self._passes(guesses)
            self._shares.learn(max(_SHARE_MIN, share))
            self._guessed.setdefault((_step(rows), _step(columns), guesses), Median()).learn(seconds)
        elif columns and plain:
            self._learn_price(rows, columns, (seconds / plain - 1) / (columns - 1))
        elif not columns:
            self._laps[_step(rows)] = self._laps.get(_step(rows), 0) + 1
            self._plain.setdefault(_step(rows), Median()).learn(seconds)

    def _learn_price(self, rows: int, columns: int, price: float) -> None:
        # What was expected counts as measured once: a first step may be slow by chance.
        self._doubts = max(0, self._doubts - 1)
        before = Median.of(self._price(rows, columns))
        self._prices.setdefault((_step(rows), _step(columns)), before).learn(max(0.0, price))

    def _fed(self, rows: int, columns: int) -> float:
        """What a step costs but for guesses."""
        return 1 + self._price(rows, columns) * max(0, columns - 1)

    def _price(self, rows: int, columns: int) -> float:
        if not self._prices:
            return _PRICE_USUAL

        def unlike(place: tuple[int, int]) -> tuple[int, int]:
            return abs(place[0] - _step(rows)), abs(place[1] - _step(columns))

        return self._prices[min(self._prices, key=unlike)].value

    def _passes(self, guesses: int) -> int:
        return -(-guesses // self.block)


def _step(count: int) -> int:
    """Counts that cost alike have one number."""
    return count.bit_length()
