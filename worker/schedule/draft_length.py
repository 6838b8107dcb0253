"""Draft-length policy: picks the drafts of the next step by acceptance rates and step costs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worker.schedule.acceptance import DraftState, expected
from worker.schedule.ngram_proposer import MODEL, Draft
from worker.schedule.rows import Row
from worker.schedule.step_cost import COST_MIN, StepCostModel

DRAFTED_MAX = 15
"""Maximum draft tokens of a row in one step."""
GAIN_MIN = 1.1
"""Minimum expected gain in speed over plain decoding."""
GAIN_KEPT = 1.03
"""The same if the last step had drafts (hysteresis): a gain of about a tenth would else switch on and off."""
_LENGTHS = (2, 4, 8, DRAFTED_MAX)
_GUESSED_LENGTHS: tuple[int, ...] = (1, 2, 4, 7)


class DraftChoice(NamedTuple):
    """Drafts of up to `length` tokens, 0: none. The draft network proposes for the rows in `asked`.

    `speed`: tokens of all rows per plain step's time, from the mean inter-token time over rows: a row that
    gains much does not make up for many that wait for it.
    """

    speed: float
    length: int = 0
    asked: Sequence[Row] = ()


class _Outlook(NamedTuple):
    """Expected acceptance of a draft, with the arguments of `acceptance.expected`."""

    acceptance: float
    room: int
    certain: int = 0

    def at(self, length: int) -> float:
        return expected(self.acceptance, min(length, self.room), self.certain)


class DraftLengthPolicy:
    """Policy over the draft state of each row (`sources`) and the step costs, which others update."""

    def __init__(self, sources: Mapping[str, DraftState], costs: StepCostModel) -> None:
        self._sources = sources
        self._costs = costs
        self._gain_min = GAIN_MIN

    def has_drafted(self, *, is_so: bool) -> None:
        """Record whether the last step had drafts."""
        self._gain_min = GAIN_KEPT if is_so else GAIN_MIN

    def may_pay(self, rows: int) -> bool:
        """Return whether drafts for so many rows would pay if all their tokens were accepted."""
        if not self._costs.is_measured(rows):
            return True
        lengths = self._lengths(rows)
        return any(1 + length > self._gain_min * self._costs.of(rows, 1 + length) for length in lengths)

    def best(
        self, found: Mapping[str, Draft], rows: int, near: Mapping[Row, int] | None = None
    ) -> DraftChoice:
        """Return the best choice for so many rows, of which those in `found` have a draft.

        `near`: rows that the draft network can draft for, with the number of tokens that each has room for.
        """
        hopes = {id: self._outlook(id, draft) for id, draft in found.items()}
        guesses = {
            row: _Outlook(self._sources[row.id].acceptance(MODEL), room) for row, room in (near or {}).items()
        }
        best = DraftChoice(self._gain_min * rows)
        most = sum(outlook.at(DRAFTED_MAX) for outlook in (*hopes.values(), *guesses.values()))
        if rows + most <= COST_MIN * best.speed:
            return best  # does not pay even at the lowest possible cost of a step
        for length in self._lengths(rows) if near is None else self._network_lengths():
            gains = {id: outlook.at(length) for id, outlook in hopes.items()}
            asked = []
            for row, outlook in guesses.items():
                gain = outlook.at(length)
                if gain > gains.get(row.id, 0.0):
                    gains[row.id] = gain
                    asked.append(row)
            if not gains or bool(asked) == (near is None):
                continue
            longest = max([hopes[id].room for id in gains if id in hopes] + [length] * bool(asked))
            cost = self._costs.of(rows, 1 + min(length, longest), length if asked else 0)
            waits = rows - len(gains) + sum(1 / (1 + gain) for gain in gains.values())
            if (speed := rows * rows / waits / cost) > best.speed:
                best = DraftChoice(speed, length, asked)
        return best

    def _lengths(self, rows: int) -> Sequence[int]:
        # While the price of columns is unknown, a few are tried.
        return _LENGTHS if self._costs.is_position_cost_measured(rows) else _LENGTHS[:1]

    def _network_lengths(self) -> Sequence[int]:
        lengths, block = _GUESSED_LENGTHS, self._costs.block
        if block > 1:
            most = min(block, DRAFTED_MAX)
            lengths = (*(length for length in _GUESSED_LENGTHS if length < most), most)
        return lengths if self._costs.is_pass_cost_measured else lengths[:1]

    def _outlook(self, id: str, draft: Draft) -> _Outlook:
        acceptance = self._sources[id].acceptance(draft.source, draft.matched)
        return _Outlook(acceptance, len(draft.tokens), draft.certain)
