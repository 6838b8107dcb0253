"""Merging, storage and comparison of results, and their documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.timing import Ratio
from bench.versus import chats, deaths, results, starts
from bench.versus.__main__ import JSON, LINES
from bench.versus.documents import BENCHMARKS, README, write
from bench.versus.results import OURS, Better, Entry, Results, Run, Side, load, merge, save
from bench.versus.tables import CHOICES, TABLES

ROOT = Path(__file__).resolve().parents[3]
RUN = Run(
    began="2026-01-01 00:00 UTC", cores=2, processor="one", blas="none", load=[0.0, 2.0], rounds=3,
    versions={"mlx": "1"},
)  # fmt: skip


def entry(
    ours: list[float], theirs: list[float], better: Better = "more", *, of: str = "a", at: int | None = None
) -> Entry:
    return Entry(
        model="dense", line="throughput", figure="rate", name="tokens/s", unit="", better=better, run=of,
        sides={OURS: Side(ours), "theirs": Side(theirs)}, at=at,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs", "better", "ratio"),
    [
        ([10, 30, 20], [10, 10, 10], "more", Ratio(2.0, 1.0, 3.0)),
        ([10, 30, 20], [30, 30, 30], "less", Ratio(1.5, 1.0, 3.0)),
        ([10, 30, 20], [10], "more", Ratio(1.0, 1.0, 1.0)),  # rounds of one side only count for nothing
        ([10], [0], "more", None),
        ([0], [10], "less", None),
    ],
)
def test_a_ratio_is_of_rounds_and_above_1_where_we_are_better(
    ours: list[float], theirs: list[float], better: Better, ratio: Ratio | None
) -> None:
    assert entry(ours, theirs, better).ratio("theirs") == ratio


def test_a_later_run_replaces_what_it_has_measured_and_nothing_else() -> None:
    first = merge(Results(), "a", RUN, [entry([1], [1], at=1), entry([2], [2], at=16)])
    second = merge(first, "b", RUN, [entry([3], [3], of="b", at=16)])
    assert [(each.at, each.sides[OURS].rounds) for each in second.entries.values()] == [(1, [1]), (16, [3])]
    assert set(second.runs) == {"a", "b"}
    assert set(merge(second, "b", RUN, [entry([3], [3], of="b", at=1)]).runs) == {"b"}
    assert [each.sides[OURS].rounds for each in first.entries.values()] == [[1], [2]]
    assert first.find("dense", "throughput", "rate", 16) is not None
    assert first.find("dense", "throughput", "rate") is None


def test_results_round_trip_through_the_file_and_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert load(file) == Results()
    found = merge(Results(), "a", RUN, [entry([1.5], [], at=4)])
    save(file, found)
    assert load(file) == found
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    file.write_text('{"entries": 3}')
    with pytest.raises(ValueError, match="entries"):
        load(file)


def test_documents_match_the_stored_results(tmp_path: Path) -> None:
    for name in (README, BENCHMARKS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    write(results.load(JSON), tmp_path)
    for name in (README, BENCHMARKS):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()


def test_each_line_has_a_table_of_figures_that_are_measured() -> None:
    assert set(TABLES) == set(LINES)
    for entry in (stored := results.load(JSON)).entries.values():
        assert entry.line in TABLES, entry.key
    for line, table in TABLES.items():
        assert set(table.figures) <= {each.figure for each in stored.entries.values() if each.line == line}


def test_readme_choices_are_measured_figures() -> None:
    measured = {
        **{(chats.LINE, at): chats.figures_at(at) for at in chats.CONCURRENCIES},
        **{(starts.LINE, at): starts.figures_at(at) for at in starts.CONCURRENCIES},
        (deaths.LINE, None): deaths.FIGURES,
    }
    for choice in CHOICES:
        assert choice.figure in {figure.key for figure in measured[choice.line, choice.at]}
        assert choice.model in LINES[choice.line][1]
