"""Which drafts are best for the next step, by how often such were right and what such steps take. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worker.schedule.known import Known
from worker.schedule.lookup import Draft
from worker.schedule.odds import COST_MIN, Costs, expected
from worker.schedule.rows import Row

DRAFTED_MAX = 15
"""Tokens of a row in one step."""
GAIN_MIN = 1.1
"""By how much more tokens in the same time it must be."""
GAIN_KEPT = 1.03
"""And where the last step had drafts: what pays by about a tenth would else begin and end by turns."""
_LENGTHS = (2, 4, 8, DRAFTED_MAX)
_GUESSED_LENGTHS: tuple[int, ...] = (1, 2, 4, 7)


class Choice(NamedTuple):
    """Drafts of such a length, 0: none; those of the rows `asked` are guessed. `speed`: tokens of all rows in
    the time of a plain step, if each were as quick as they are on the average of times between tokens: a row
    that gains much does not make up for many that wait for it."""

    speed: float
    length: int = 0
    asked: Sequence[Row] = ()


class _Hope(NamedTuple):
    """What is expected of a draft: as `odds.expected`."""

    odds: float
    room: int
    certain: int = 0

    def at(self, length: int) -> float:
        return expected(self.odds, min(length, self.room), self.certain)


class Choices:
    """`sources`: what is known of each row; `costs`: of steps. Others learn them."""

    def __init__(self, sources: Mapping[str, Known], costs: Costs) -> None:
        self._sources = sources
        self._costs = costs
        self._gain_min = GAIN_MIN

    def has_drafted(self, *, is_so: bool) -> None:
        """Whether the last step had drafts."""
        self._gain_min = GAIN_KEPT if is_so else GAIN_MIN

    def may_pay(self, rows: int) -> bool:
        """Whether drafts for so many rows would bring anything if all of them were right."""
        if not self._costs.knows(rows):
            return True
        lengths = self._lengths(rows)
        return any(1 + length > self._gain_min * self._costs.of(rows, 1 + length) for length in lengths)

    def best(self, found: Mapping[str, Draft], rows: int, near: Mapping[Row, int] | None = None) -> Choice:
        """The length of drafts that is best for so many rows, some of which have `found` one. `near`: who
        could be guessed for, and how many tokens each has room for."""
        hopes = {id: self._hope(id, draft) for id, draft in found.items()}
        guesses = {row: _Hope(self._sources[row.id].rate.value, room) for row, room in (near or {}).items()}
        best = Choice(self._gain_min * rows)
        most = sum(hope.at(DRAFTED_MAX) for hope in (*hopes.values(), *guesses.values()))
        if rows + most <= COST_MIN * best.speed:
            return best  # the least that a step can cost is too much
        for length in self._lengths(rows) if near is None else self._guessed_lengths():
            gains = {id: hope.at(length) for id, hope in hopes.items()}
            asked = []
            for row, hope in guesses.items():
                gain = hope.at(length)
                if gain > gains.get(row.id, 0.0):
                    gains[row.id] = gain
                    asked.append(row)
            if not gains or bool(asked) == (near is None):
                continue
            longest = max([hopes[id].room for id in gains if id in hopes] + [length] * bool(asked))
            cost = self._costs.of(rows, 1 + min(length, longest), length if asked else 0)
            waits = rows - len(gains) + sum(1 / (1 + gain) for gain in gains.values())
            if (speed := rows * rows / waits / cost) > best.speed:
                best = Choice(speed, length, asked)
        return best

    def _lengths(self, rows: int) -> Sequence[int]:
        # Whoever does not know yet what columns cost tries a few.
        return _LENGTHS if self._costs.knows_price(rows) else _LENGTHS[:1]

    def _guessed_lengths(self) -> Sequence[int]:
        lengths, block = _GUESSED_LENGTHS, self._costs.block
        if block > 1:
            most = min(block, DRAFTED_MAX)
            lengths = (*(length for length in _GUESSED_LENGTHS if length < most), most)
        return lengths if self._costs.is_share_known else lengths[:1]

    def _hope(self, id: str, draft: Draft) -> _Hope:
        return _Hope(self._sources[id].odds_of(draft), len(draft.tokens), draft.certain)
