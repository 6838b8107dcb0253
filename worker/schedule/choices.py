"""Which drafts are best for the next step, by how often such were right and what such steps take. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worker.schedule.known import Known
from worker.schedule.lookup import Draft
from worker.schedule.odds import Costs, expected
from worker.schedule.rows import Row

DRAFTED_MAX = 15
"""Tokens of a row in one step."""
GAIN_MIN = 1.1
"""By how much more tokens in the same time it must be."""
_LENGTHS = (2, 4, 8, DRAFTED_MAX)
_GUESSED_LENGTHS = (1, 2, 4, 7)


class Choice(NamedTuple):
    """Drafts of such a length, 0: none; those of the rows `asked` are guessed. `speed`: tokens of all rows in
    the time of a plain step."""

    speed: float
    length: int = 0
    asked: Sequence[Row] = ()


NO_CHOICE = Choice(0.0)


class Choices:
    """`sources`: what is known of each row; `costs`: of steps. Others learn them."""

    def __init__(self, sources: Mapping[str, Known], costs: Costs) -> None:
        self._sources = sources
        self._costs = costs

    def best(self, found: Mapping[str, Draft], rows: int, near: Mapping[Row, int] | None = None) -> Choice:
        """The length of drafts that is best for so many rows, some of which have `found` one. `near`: who
        could be guessed for, and how many tokens each has room for."""
        best = Choice(GAIN_MIN * rows)
        if not found and not near:
            return best
        guessed = _GUESSED_LENGTHS if self._costs.is_share_known else _GUESSED_LENGTHS[:1]
        for length in _LENGTHS if near is None else guessed:
            gains = {id: self._sources[id].expected(draft, length) for id, draft in found.items()}
            asked = []
            for row, room in (near or {}).items():
                gain = expected(self._sources[row.id].rate.value, min(length, room))
                if gain > gains.get(row.id, 0.0):
                    gains[row.id] = gain
                    asked.append(row)
            if not gains or bool(asked) == (near is None):
                continue
            longest = max([len(found[id].tokens) for id in gains if id in found] + [length] * bool(asked))
            cost = self._costs.of(rows, 1 + min(length, longest), length if asked else 0)
            if (speed := (rows + sum(gains.values())) / cost) > best.speed:
                best = Choice(speed, length, asked)
        return best
