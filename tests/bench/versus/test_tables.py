"""Tables of results."""

from __future__ import annotations

import msgspec
import pytest

from bench.versus.results import OURS, Better, Entry, Results, Run, Side, merge
from bench.versus.tables import CHOICES, LOST, number, short, whole


def results(*entries: Entry) -> Results:
    run = Run(
        began="2026-01-01 00:00 UTC",
        cores=2,
        processor="a chip",
        blas="libopenblas.so.0",
        load=[0.1, 2.0],
        rounds=3,
        versions={"mlx": "0.32"},
    )
    return merge(Results(), "a", run, entries)


def entry(model: str, better: Better = "more", **sides: Side) -> Entry:
    named = {OURS if name == "ours" else name.replace("_", "."): side for name, side in sides.items()}
    return Entry(
        model=model,
        line="throughput",
        figure="rate",
        name="tokens/s",
        unit="",
        better=better,
        run="a",
        sides=named,
        at=16,
    )


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "0"), (0.123, "0.12"), (9.96, "10.0"), (99.4, "99.4"), (99.6, "100"), (12345.6, "12,346")],
)
def test_numbers_have_the_digits_that_mean_something(value: float, written: str) -> None:
    assert number(value) == written


def chosen(**sides: Side) -> Entry:
    """Return an entry of the README's first row."""
    return msgspec.structs.replace(entry("smollm2", **sides), line="chats", at=1)


def test_readme_shows_a_row_for_each_choice_with_the_best_in_bold() -> None:
    table = short(results(chosen(ours=Side([300.0]), other_server=Side([200.0]))))
    head, _, *rows = table.splitlines()
    assert head == "|  | rounds | ours | `other.server` |"
    assert rows == ["| chats, 1 at once: tokens/s | 3 | **300** | 200 |"]


def test_lost_comparison_is_marked() -> None:
    [*_, row] = short(results(chosen(ours=Side([1.0]), other=Side([2.0])))).splitlines()
    assert LOST in row
    assert "**2**" in row


def test_lines_that_nothing_is_known_of_are_left_out() -> None:
    assert len(short(results(chosen(ours=Side([1.0])))).splitlines()) == 3
    assert len(short(Results()).splitlines()) == 2


def test_choices_are_all_different() -> None:
    chosen = {(choice.line, choice.figure, choice.at) for choice in CHOICES}
    assert len(chosen) == len({choice.label for choice in CHOICES}) == len(CHOICES)


def test_the_whole_has_ratios_with_least_and_most_and_says_why_a_cell_is_empty() -> None:
    gone = Side(note="not installed")
    table = whole(results(entry("dense", ours=Side([10.0, 30.0, 20.0]), slow=Side([10.0] * 3), gone=gone)))
    assert "| tokens/s, 16 at once | **20** | – [1] | 10 · 2.00 (1.00-3.00) |" in table
    assert "1. gone: not installed" in table
    assert "* 2026-01-01 00:00 UTC: 2 cores (a chip), load 0.1" in table


def test_one_note_of_several_figures_is_said_once() -> None:
    note = Side(note="it has ended")
    first = entry("dense", ours=Side([1.0]), gone=note)
    second = Entry(
        model="dense",
        line="throughput",
        figure="cpu",
        name="CPU",
        unit="s",
        better="less",
        run="a",
        sides={OURS: Side([1.0]), "gone": note},
    )
    assert whole(results(first, second)).count("it has ended") == 1
