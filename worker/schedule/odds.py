"""How often drafts are right, and what a step costs that tries them. Pure: measured seconds are handed in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_MATCHES = ((16, 0.9), (8, 0.85), (5, 0.65), (0, 0.5))
"""From so many equal tokens before it, how often a draft's first token was right over many edits of files."""
_PRIOR = 4.0
"""What that counts for, in tries."""
_FADING = 0.97
"""Of what a try counts for, so much is left at the next."""
_COST_EACH = 0.25
"""What a column adds to a step, in terms of one column, while nothing has been measured."""
_SHARE_MIN = 0.01
_COST_RATE = 0.2
PLAIN_LAPS = 4
"""Before anything is compared with a plain step, so many have been measured."""
_COST_OFF_MAX = 3.0
"""A measurement counts for no more than so many times what was expected."""


@dataclass(slots=True)
class Odds:
    """Of one row."""

    _tries: dict[int, float] = field(default_factory=dict)
    _hits: dict[int, float] = field(default_factory=dict)

    def of(self, matched: int) -> float:
        """How likely the next token of a draft is right that so many equal tokens stand before; 0 to 1."""
        kind, usual = _kind(matched)
        return (self._hits.get(kind, 0) + _PRIOR * usual) / (self._tries.get(kind, 0) + _PRIOR)

    def learn(self, matched: int, right: int, tried: int) -> None:
        """Of so many drafted tokens so many were right; behind a wrong one nothing was tried."""
        kind, _ = _kind(matched)
        made = min(right + 1, tried)
        self._tries[kind] = self._tries.get(kind, 0) * _FADING**made + made
        self._hits[kind] = self._hits.get(kind, 0) * _FADING**made + right


def _kind(matched: int) -> tuple[int, float]:
    return next((least, usual) for least, usual in _MATCHES if matched >= least)


@dataclass(slots=True)
class Rate:
    """How often a network's guesses are right, of one row or of all. `usual`: while few have been tried."""

    usual: float
    _tries: float = 0.0
    _hits: float = 0.0

    @property
    def value(self) -> float:
        """How likely the next of its tokens is right, if all before it are; 0 to 1."""
        return (self._hits + _PRIOR * self.usual) / (self._tries + _PRIOR)

    def learn(self, right: int, tried: int) -> None:
        """As `Odds.learn`."""
        made = min(right + 1, tried)
        self.fade(_FADING**made)
        self._tries += made
        self._hits += right

    def fade(self, share: float) -> None:
        """What is known counts for so much of what it counted."""
        self._tries *= share
        self._hits *= share


def expected(odds: float, count: int) -> float:
    """Tokens of so many that are right, where each is so likely right if all before it are."""
    return sum(odds**place for place in range(1, count + 1))


@dataclass(slots=True)
class Costs:
    """Seconds of steps, by how many rows and columns they have, plain ones have none, and how many tokens a
    network guessed for each row. `share`: what a guess costs, in terms of a plain step; at first as is
    `told`, then as measured."""

    told: float = 0.0
    share: float = field(init=False)
    is_share_known: bool = False
    _seconds: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _laps: dict[int, int] = field(default_factory=dict)
    """How many plain ones have been measured, by their rows."""

    def __post_init__(self) -> None:
        self.share = self.told

    def of(self, rows: int, columns: int, guesses: int = 0) -> float:
        """What such a step takes in terms of a plain one; infinite where that has not been measured."""
        plain = self.plain(rows)
        if not plain or self._laps.get(_step(rows), 0) < PLAIN_LAPS:
            return math.inf
        known = self._seconds.get((_step(rows), _step(columns), guesses))
        return known / plain if known else 1 + _COST_EACH * (columns - 1) + self.share * guesses

    def plain(self, rows: int) -> float:
        """Seconds of a plain step; 0 where none has been measured."""
        return self._seconds.get((_step(rows), 0, 0), 0.0)

    def forget_guessed(self) -> None:
        """What steps take whose drafts a network guesses is to be measured anew."""
        self._seconds = {place: seconds for place, seconds in self._seconds.items() if not place[2]}
        self.share, self.is_share_known = self.told, False

    def forget(self, rows: int) -> None:
        """What a plain step of so many rows takes is to be measured anew."""
        self._laps[_step(rows)] = 0

    def learn(self, rows: int, columns: int, seconds: float, guesses: int = 0) -> None:
        """Such a step took so long. 0 columns: a plain one."""
        place = _step(rows), _step(columns), guesses
        if not columns:
            self._laps[_step(rows)] = self._laps.get(_step(rows), 0) + 1
        if guesses and (plain := self.plain(rows)):
            more = seconds / plain - 1 - _COST_EACH * (columns - 1)
            self.share, self.is_share_known = max(_SHARE_MIN, more / guesses), True
        old = self._seconds.get(place)
        if old is None:
            self._seconds[place] = seconds
        else:
            self._seconds[place] = old + _COST_RATE * (min(seconds, _COST_OFF_MAX * old) - old)


def _step(count: int) -> int:
    """Counts that cost alike have one number."""
    return count.bit_length()
