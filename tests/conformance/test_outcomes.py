"""Parsing of a program's last line, and the rules for passing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.conformance.outcomes import Count, Outcome, count_of, show


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ("OK a\nOK b\n2/2\n", Count(2, 2)),
        ("FAIL a 1/3\n  0/12 \n\n", Count(0, 12)),
        ("2/2\nTraceback\n", None),  # it failed after the count
        ("passed 2/2\n", None),
        ("2/2 of them", None),
        ("2/", None),
        ("", None),
    ],
)
def test_only_the_last_line_counts(said: str, count: Count | None) -> None:
    assert count_of(said) == count


@pytest.mark.parametrize(
    ("status", "count", "passed"),
    [
        (0, Count(3, 3), True),
        (0, Count(2, 3), False),
        (0, Count(0, 0), False),  # it has checked nothing
        (0, None, False),
        (1, Count(3, 3), False),
        (-9, Count(3, 3), False),
        (None, None, False),
    ],
)
def test_all_of_something_and_status_0_have_passed(
    status: int | None, count: Count | None, passed: bool
) -> None:
    assert Outcome("sdks", "a", status, count).passed is passed


def test_where_the_status_is_enough_a_count_still_tells() -> None:
    assert Outcome("fuzz", "a", 0, must_count=False).passed
    assert not Outcome("fuzz", "a", 1, must_count=False).passed
    assert not Outcome("agents", "a", 0, Count(4, 5), must_count=False).passed


def shown(outcomes: list[Outcome], not_run: list[str]) -> str:
    page = io.StringIO()
    show(outcomes, not_run, Console(file=page, width=200))
    return page.getvalue()


def test_the_table_has_a_row_for_each_and_one_line_for_what_was_not_run() -> None:
    good = Outcome("sdks", "a.py", 0, Count(3, 3), took_s=4.4)
    bad = Outcome("agents", "b", 1, Count(1, 5), why="status 1")
    page = shown([good, bad], ["c.mjs (no npm)", "d (no e)"]).splitlines()
    (first,) = [line for line in page if "a.py" in line]
    (second,) = [line for line in page if "agents" in line]
    assert "3/3" in first
    assert "passed" in first
    assert "1/5" in second
    assert "FAILED status 1" in second
    assert page[-1] == "not run: c.mjs (no npm); d (no e)"
    assert "not run" not in shown([good], [])
