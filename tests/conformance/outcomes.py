"""Outcomes of programs, from the last line of their output, and a table of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

_COUNT = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Count:
    passed: int
    total: int

    def __str__(self) -> str:
        return f"{self.passed}/{self.total}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a program. `status`: None if it was not run. `why`: a failure outside the count.
    `must_count`: the exit status alone is not sufficient."""

    lane: str
    name: str
    status: int | None
    count: Count | None = None
    took_s: float = 0.0
    why: str = ""
    must_count: bool = True

    @property
    def passed(self) -> bool:
        """Whether all checks, at least one, and the exit status passed."""
        if self.count is None:
            return self.status == 0 and not self.must_count
        return self.status == 0 and 0 < self.count.total == self.count.passed


def count_of(said: str) -> Count | None:
    """Parse `passed/total` from the last line of a program's output."""
    lines = said.rstrip().splitlines()
    found = _COUNT.fullmatch(lines[-1].strip()) if lines else None
    return Count(int(found[1]), int(found[2])) if found else None


def show(outcomes: Sequence[Outcome], passed_over: Sequence[str], console: Console) -> None:
    """Print a row for each outcome, then a line of all that could not be run."""
    table = Table("lane", "what", "passed", "seconds", "", title="conformance", title_justify="left")
    for outcome in outcomes:
        verdict = "[green]passed[/]" if outcome.passed else f"[red]FAILED[/] {outcome.why}"
        count = str(outcome.count) if outcome.count else "-"
        table.add_row(outcome.lane, outcome.name, count, f"{outcome.took_s:.0f}", verdict)
    console.print(table)
    if passed_over:
        console.print(f"not run: {'; '.join(passed_over)}", markup=False)
