"""Measurements in turns, so that noise on the machine affects all sides alike; medians, ratios and tables."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

WIDTH = 130


@dataclass(frozen=True)
class Work:
    """An amount (tokens, requests) done in a number of seconds."""

    amount: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.amount / self.seconds

    def __add__(self, other: Work) -> Work:
        return Work(self.amount + other.amount, self.seconds + other.seconds)


Measure = Callable[[], Work]


@dataclass(frozen=True)
class Ratio:
    """Comparison of two sides: the median, smallest and largest of the rounds' ratios."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.most:.2f})"


def timed(work: Callable[[], float]) -> Work:
    """Time `work`, which returns the amount that it has done."""
    began = time.perf_counter()
    amount = work()
    return Work(amount, time.perf_counter() - began)


def alternate(sides: Mapping[str, Measure], rounds: int, turns: int = 1) -> dict[str, list[Work]]:
    """Return the work of each side in each round. In a round every side has `turns` turns, summed up.

    The first side rotates from turn to turn. A round before the first is a warm-up and is left out.
    """
    names = list(sides)
    done: dict[str, list[Work]] = {name: [] for name in names}
    for number in range(rounds + 1):
        sums = dict.fromkeys(names, Work(0, 0))
        for turn in range(turns):
            first = (number + turn) % len(names)
            for name in names[first:] + names[:first]:
                sums[name] += sides[name]()
        if number > 0:
            for name in names:
                done[name].append(sums[name])
    return done


def median_rate(rounds: Sequence[Work]) -> float:
    """Return the median of the rounds' rates."""
    return statistics.median(each.rate for each in rounds)


def compare(ours: Sequence[Work], theirs: Sequence[Work]) -> Ratio:
    """Return our rate over theirs, round by round: noise that lasts a whole round cancels out."""
    return spread([mine.rate / other.rate for mine, other in zip(ours, theirs, strict=True)])


def spread(values: Sequence[float]) -> Ratio:
    """Return the median, smallest and largest of the rounds' values."""
    return Ratio(statistics.median(values), min(values), max(values))


def number(value: float) -> str:
    """Format with three significant digits, or all before the decimal point; integers without decimals."""
    digits = 0 if value == int(value) or abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2
    return f"{value:,.{digits}f}"


@dataclass(frozen=True)
class Slope:
    """Slope of a fitted line, and half the width of its 95% confidence interval."""

    rise: float
    margin: float


BLOCKS = 10
_STUDENT_T = 2.306  # 97.5%, for the 8 degrees of freedom that 10 blocks leave


def fit_slope(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """Fit a line by least squares over the means of ten blocks. Raises `ValueError` for fewer than ten
    samples.

    Neighbouring samples of a process's memory are correlated; used one by one they would make the interval
    far too narrow.
    """
    if len(xs) < BLOCKS:
        raise ValueError(f"{len(xs)} samples do not fill {BLOCKS} blocks")
    edges = [len(xs) * block // BLOCKS for block in range(BLOCKS + 1)]
    blocks = [slice(*edge) for edge in itertools.pairwise(edges)]
    centres = [statistics.fmean(xs[block]) for block in blocks]
    means = [statistics.fmean(ys[block]) for block in blocks]
    rise, start = statistics.linear_regression(centres, means)
    squares = sum((y - start - rise * x) ** 2 for x, y in zip(centres, means, strict=True))
    spread = sum((x - statistics.fmean(centres)) ** 2 for x in centres)
    return Slope(rise, _STUDENT_T * math.sqrt(squares / (BLOCKS - 2) / spread))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], legend: str) -> None:
    """Print a plain table, and below it a legend that explains its columns."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(width=WIDTH, highlight=False)
    console.print(table)
    console.print(legend, markup=False)
    console.print()
