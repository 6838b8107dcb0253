"""How often drafts are right, and what a step costs that tries them. Pure: measured seconds are handed in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_MATCHES = ((16, 0.9), (8, 0.85), (5, 0.65), (0, 0.5))
"""From so many equal tokens before it, how often a draft's first token was right over many edits of files."""
_HELD_TO = 0.7
"""The same of drafts made of what an answer is held to, but for what is certain of them."""
_PRIOR = 4.0
"""What that counts for, in tries."""
_FADING = 0.97
"""Of what a try counts for, so much is left at the next."""
_COST_EACH = 0.25
"""What a column adds to a step, in terms of one column, while nothing has been measured."""
_COST_RATE = 0.2
PLAIN_LAPS = 4
"""Before anything is compared with a plain step, so many have been measured."""
_COST_OFF_MAX = 3.0
"""A measurement counts for no more than so many times what was expected."""


@dataclass(slots=True)
class Odds:
    """Of one row."""

    _tries: dict[int | None, float] = field(default_factory=dict)
    _hits: dict[int | None, float] = field(default_factory=dict)

    def of(self, matched: int | None) -> float:
        """How likely the next token of a draft is right that so many equal tokens stand before; 0 to 1. None:
        it was not looked up, but is what the answer is held to."""
        kind, usual = _kind(matched)
        return (self._hits.get(kind, 0) + _PRIOR * usual) / (self._tries.get(kind, 0) + _PRIOR)

    def learn(self, matched: int | None, right: int, tried: int) -> None:
        """Of so many drafted tokens so many were right; behind a wrong one nothing was tried."""
        kind, _ = _kind(matched)
        made = min(right + 1, tried)
        self._tries[kind] = self._tries.get(kind, 0) * _FADING**made + made
        self._hits[kind] = self._hits.get(kind, 0) * _FADING**made + right


def _kind(matched: int | None) -> tuple[int | None, float]:
    if matched is None:
        return None, _HELD_TO
    return next((least, usual) for least, usual in _MATCHES if matched >= least)


@dataclass(slots=True)
class Costs:
    """Seconds of steps, by how many rows and columns they have: plain ones have none."""

    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    _laps: dict[int, int] = field(default_factory=dict)
    """How many plain ones have been measured, by their rows."""

    def of(self, rows: int, columns: int) -> float:
        """What such a step takes in terms of a plain one; infinite where that has not been measured."""
        plain = self._seconds.get((_step(rows), 0), 0.0)
        if not plain or self._laps.get(_step(rows), 0) < PLAIN_LAPS:
            return math.inf
        known = self._seconds.get((_step(rows), _step(columns)))
        return known / plain if known else 1 + _COST_EACH * (columns - 1)

    def forget(self, rows: int) -> None:
        """What a plain step of so many rows takes is to be measured anew."""
        self._laps[_step(rows)] = 0

    def learn(self, rows: int, columns: int, seconds: float) -> None:
        """Such a step took so long. 0 columns: a plain one."""
        place = _step(rows), _step(columns)
        if not columns:
            self._laps[_step(rows)] = self._laps.get(_step(rows), 0) + 1
        old = self._seconds.get(place)
        if old is None:
            self._seconds[place] = seconds
        else:
            self._seconds[place] = old + _COST_RATE * (min(seconds, _COST_OFF_MAX * old) - old)


def _step(count: int) -> int:
    """Counts that cost alike have one number."""
    return count.bit_length()
