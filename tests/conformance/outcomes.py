"""What came of each program, as its own last line has it, and the table of them all."""

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
    """`status`: None, where it was never run. `why`: of what is not in the count. `must_count`: its status
    alone says nothing."""

    lane: str
    name: str
    status: int | None
    count: Count | None = None
    took_s: float = 0.0
    why: str = ""
    must_count: bool = True

    @property
    def passed(self) -> bool:
        """All of at least one check, and the program agrees."""
        if self.count is None:
            return self.status == 0 and not self.must_count
        return self.status == 0 and 0 < self.count.total == self.count.passed


def count_of(said: str) -> Count | None:
    """The `passed/total` that is the last line of what a program said."""
    lines = said.rstrip().splitlines()
    found = _COUNT.fullmatch(lines[-1].strip()) if lines else None
    return Count(int(found[1]), int(found[2])) if found else None


def show(outcomes: Sequence[Outcome], passed_over: Sequence[str], console: Console) -> None:
    """A row for each outcome, then a line for all that could not be run."""
    table = Table("lane", "what", "passed", "seconds", "", title="conformance", title_justify="left")
    for outcome in outcomes:
        verdict = "[green]passed[/]" if outcome.passed else f"[red]FAILED[/] {outcome.why}"
        count = str(outcome.count) if outcome.count else "-"
        table.add_row(outcome.lane, outcome.name, count, f"{outcome.took_s:.0f}", verdict)
    console.print(table)
    if passed_over:
        console.print(f"not run: {'; '.join(passed_over)}", markup=False)
