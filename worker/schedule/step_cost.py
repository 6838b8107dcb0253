"""Step cost model of speculation: plain steps, verify columns and draft passes. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import InitVar, dataclass, field
from functools import partial

from worker.contract.drafts import PRICED_COLUMNS

LAPS_MIN = 4
"""Minimum measurements of one kind of step before its time counts as known. In the first ones kernels are
compiled or buffers grow."""
LAPS_KEPT = 7
"""Window of the running medians, per kind of step. A median, because a busy machine makes single steps take
many times as long."""
COST_MIN = 1.02
"""Lower bound for a step with drafts, in plain steps: a lower measurement means that the machine was busy."""
_PRICE_USUAL = 0.25
"""Default cost of a further column in a step, in plain steps, until one is measured."""
_PASS_COST_MIN = 0.01
_OPTIMISM = 0.5
"""Share of the initial estimate assumed for a draft pass until measured: only passes that are tried are."""
DOUBTED_STEPS = 400
"""Steps with drafts after which plain steps are measured again."""
HOPELESS_STEPS = 4096
"""Steps in which no drafts could pay after which the column prices are measured again."""
DOUBTS = 2
"""Number of prices that are relearned with few columns after that."""


@dataclass(slots=True)
class RunningMedian:
    """Low median of the last `LAPS_KEPT` measurements."""

    value: float = 0.0
    _last: deque[float] = field(default_factory=partial(deque, maxlen=LAPS_KEPT))

    @classmethod
    def of(cls, first: float) -> RunningMedian:
        """Create a median of one measurement."""
        median = cls()
        median.learn(first)
        return median

    def __len__(self) -> int:
        return len(self._last)

    def learn(self, measured: float) -> None:
        self._last.append(measured)
        self.value = statistics.median_low(self._last)


@dataclass(slots=True)
class StepCostModel:
    """Cost of a step in plain steps, by number of rows, columns and draft tokens that a network proposed.

    `pass_cost_prior`: initial estimate of one draft pass; `block`: draft tokens per pass; `position_cost`: as
    in `contract.Model`. A verification step costs one plain step plus a price for each column after the
    first. The price is that of the most similar steps measured, compared by rows first. Old measurements are
    doubted: the machine may have been busy.
    """

    pass_cost_prior: float = 0.0
    block: int = 1
    position_cost: InitVar[float | None] = None
    _pass_cost: RunningMedian = field(default_factory=RunningMedian)
    _plain: dict[int, RunningMedian] = field(default_factory=dict)
    """Seconds of plain steps, by size class of rows (`_step`)."""
    _step_times: dict[int, int] = field(default_factory=dict)
    """Number of measured plain steps, by the same key."""
    _prices: dict[tuple[int, int], RunningMedian] = field(default_factory=dict)
    """Cost of each column after the first in plain steps, by rows and columns."""
    _cost_retries: int = 0
    """Number of prices still to be learned before one counts as known again."""
    _proposed_by_network: dict[tuple[int, int, int], RunningMedian] = field(default_factory=dict)
    """Seconds of steps with draft passes, by rows, columns and proposed tokens."""
    _unchecked: int = 0
    """Steps with drafts since a plain one was measured."""
    _hopeless: int = 0
    """Steps in which no drafts could have paid, since the prices were discarded."""

    def __post_init__(self, position_cost: float | None) -> None:
        if position_cost is not None:
            self._prices[_step(1), _step(PRICED_COLUMNS)] = RunningMedian.of(position_cost)

    @property
    def pass_cost(self) -> float:
        """Cost of a draft pass, in plain steps."""
        return self._pass_cost.value if self.is_pass_cost_measured else _OPTIMISM * self.pass_cost_prior

    @property
    def is_pass_cost_measured(self) -> bool:
        return len(self._pass_cost) > 0

    def of(self, rows: int, columns: int, guesses: int = 0) -> float:
        """Return the cost of such a step in plain steps; infinite if plain ones have not been measured."""
        plain = self.plain(rows)
        if not plain or not self.is_measured(rows):
            return math.inf
        usual = self._verify_cost(rows, columns) + self.pass_cost * self._passes(guesses)
        known = self._proposed_by_network.get((_step(rows), _step(columns), guesses))
        if known is None:
            return max(COST_MIN, usual)
        cost = max(COST_MIN, known.value / plain)
        return cost if len(known) >= LAPS_MIN else min(cost, usual)

    def is_measured(self, rows: int) -> bool:
        """Return whether the time of a plain step with `rows` rows is known."""
        return self._step_times.get(_step(rows), 0) >= LAPS_MIN

    def is_position_cost_measured(self, rows: int) -> bool:
        """Return whether the price of a column is known at this number of rows."""
        return not self._cost_retries and any(known == _step(rows) for known, _ in self._prices)

    def plain(self, rows: int) -> float:
        """Return the seconds of a plain step; 0 if none has been measured."""
        known = self._plain.get(_step(rows))
        return known.value if known else 0.0

    def forget_draft_passes(self) -> None:
        """Discard the measurements of steps with draft passes."""
        self._proposed_by_network, self._pass_cost = {}, RunningMedian()

    def on_hopeless_step(self) -> None:
        """Count a step in which no draft could pay. Discard the column prices after `HOPELESS_STEPS`."""
        self._hopeless += 1
        if self._hopeless >= HOPELESS_STEPS:
            self._prices, self._cost_retries, self._hopeless = {}, DOUBTS, 0

    def on_drafts(self, rows: int) -> None:
        """Count a step with drafts. Have plain steps of so many rows measured again after `DOUBTED_STEPS`."""
        self._unchecked += 1
        if self._unchecked >= DOUBTED_STEPS:
            self._step_times[_step(rows)] = self._unchecked = 0

    def learn(self, rows: int, columns: int, seconds: float, guesses: int = 0) -> None:
        """Record the time of a step. 0 `columns`: a plain one; with `guesses`, draft passes ran beside it."""
        plain = self.plain(rows)
        if not columns:
            self._unchecked = 0
        if guesses:
            share = (seconds / (plain or seconds) - self._verify_cost(rows, columns)) / self._passes(guesses)
            self._pass_cost.learn(max(_PASS_COST_MIN, share))
            self._proposed_by_network.setdefault(
                (_step(rows), _step(columns), guesses), RunningMedian()
            ).learn(seconds)
        elif columns and plain:
            self._learn_price(rows, columns, (seconds / plain - 1) / (columns - 1))
        elif not columns:
            self._step_times[_step(rows)] = self._step_times.get(_step(rows), 0) + 1
            self._plain.setdefault(_step(rows), RunningMedian()).learn(seconds)

    def _learn_price(self, rows: int, columns: int, price: float) -> None:
        # The expected price counts as one measurement: a first step may be slow by chance.
        self._cost_retries = max(0, self._cost_retries - 1)
        before = RunningMedian.of(self._price(rows, columns))
        self._prices.setdefault((_step(rows), _step(columns)), before).learn(max(0.0, price))

    def _verify_cost(self, rows: int, columns: int) -> float:
        """Return the cost of a step without draft passes."""
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
    """Return the size class of a count: counts of one bit length are taken to cost the same."""
    return count.bit_length()
