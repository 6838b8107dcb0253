"""Stored results: figures of each side, round by round, and the runs that they come from.

An entry is one figure of one model. All its sides come from one run, in turns, so that their ratios are
meaningful. A later run replaces the entries that it has measured, and leaves the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from bench.timing import Ratio, spread

OURS = "roundhouse"
Better = Literal["more", "less"]


class Side(msgspec.Struct, frozen=True, omit_defaults=True):
    """Results of one side. `rounds`: one value each. `note`: why there are none, or fewer than expected, or
    what differs from the other sides."""

    rounds: list[float] = []
    note: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure of one model. `name`: its label in documents. `at`: concurrency, where it varies. `run`: the
    key of its run."""

    model: str
    line: str
    figure: str
    name: str
    unit: str
    better: Better
    run: str
    sides: dict[str, Side]
    at: int | None = None

    @property
    def key(self) -> str:
        parts = [self.model, self.line, self.figure, *([] if self.at is None else [str(self.at)])]
        return "/".join(parts)

    def ratio(self, other: str) -> Ratio | None:
        """Return by how much we are better than `other`: above 1 if better, round by round. None if one of
        them has no values, or a zero, for which no ratio exists."""
        pairs = list(zip(self._rounds(OURS), self._rounds(other), strict=False))
        if not pairs or any(min(pair) <= 0 for pair in pairs):
            return None
        ratios = [ours / theirs if self.better == "more" else theirs / ours for ours, theirs in pairs]
        return spread(ratios)

    def best(self) -> str | None:
        """Return the side with the best median, the first of equals; None if no side has one."""
        medians = {name: side.median for name, side in self.sides.items() if side.median is not None}
        if not medians:
            return None
        choose = max if self.better == "more" else min
        return choose(medians, key=lambda name: medians[name])

    def is_lost(self) -> bool:
        """Return whether another server is better than ours, when rounded to two decimals."""
        return any(self._loses_to(name) for name in self.sides if name != OURS)

    def _loses_to(self, name: str) -> bool:
        if (ratio := self.ratio(name)) is not None:
            return round(ratio.median, 2) < 1
        ours, theirs = (self.sides[side].median if side in self.sides else None for side in (OURS, name))
        if ours is None or theirs is None:
            return False
        return ours < theirs if self.better == "more" else ours > theirs

    def _rounds(self, name: str) -> Sequence[float]:
        return self.sides[name].rounds if name in self.sides else ()


class Run(msgspec.Struct, frozen=True):
    """Time and machine of a run. `load`: of the last minute, at the start and at the end, our own
    included."""

    began: str
    cores: int
    processor: str
    blas: str
    load: list[float]
    rounds: int
    versions: dict[str, str]


class Results(msgspec.Struct, frozen=True):
    """Entries by their keys, runs by their start times."""

    runs: dict[str, Run] = {}
    entries: dict[str, Entry] = {}

    def find(self, model: str, line: str, figure: str, at: int | None = None) -> Entry | None:
        name = "/".join([model, line, figure, *([] if at is None else [str(at)])])
        return self.entries.get(name)


def merge(results: Results, key: str, run: Run, entries: Sequence[Entry]) -> Results:
    """Return the results with `entries` replacing those of the same keys, without runs that have no entry
    left."""
    merged = results.entries | {entry.key: entry for entry in entries}
    used = {entry.run for entry in merged.values()}
    runs = results.runs | {key: run}
    return Results({name: each for name, each in sorted(runs.items()) if name in used}, merged)


def load(path: Path) -> Results:
    """Return the results of a file, none if it does not exist. Raises `msgspec.DecodeError` for another kind
    of file."""
    return msgspec.json.decode(path.read_bytes(), type=Results) if path.exists() else Results()


def save(path: Path, results: Results) -> None:
    """Write the file atomically, so that an interrupted run loses nothing."""
    draft = path.with_name(path.name + ".new")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    draft.replace(path)
