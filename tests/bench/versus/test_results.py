"""Merging, storage and comparison of results."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.timing import Ratio
from bench.versus.results import OURS, Better, Entry, Results, Run, Side, load, merge, save

values = st.floats(0.001, 1e6)


def run(began: str = "2026-01-01 00:00 UTC") -> Run:
    return Run(
        began=began, cores=2, processor="one", blas="none", load=[0.0, 2.0], rounds=3, versions={"mlx": "1"}
    )


def entry(
    ours: list[float],
    theirs: list[float],
    better: Better = "more",
    *,
    figure: str = "rate",
    of: str = "a",
    at: int | None = None,
) -> Entry:
    return Entry(
        model="dense",
        line="throughput",
        figure=figure,
        name="tokens/s",
        unit="",
        better=better,
        run=of,
        sides={OURS: Side(ours), "theirs": Side(theirs)},
        at=at,
    )


def test_a_ratio_is_of_rounds_and_above_1_where_we_are_better() -> None:
    assert entry([10, 30, 20], [10, 10, 10]).ratio("theirs") == Ratio(2.0, 1.0, 3.0)
    assert entry([10, 30, 20], [30, 30, 30], "less").ratio("theirs") == Ratio(1.5, 1.0, 3.0)


@given(ours=values, theirs=values)
def test_ratio_is_the_same_for_more_and_less_is_better(ours: float, theirs: float) -> None:
    more = entry([ours], [theirs], "more").ratio("theirs")
    less = entry([1 / ours], [1 / theirs], "less").ratio("theirs")
    assert more is not None
    assert less is not None
    assert math.isclose(more.median, less.median, rel_tol=1e-9)


def test_rounds_that_only_one_side_has_count_for_nothing() -> None:
    assert entry([10, 30, 20], [10]).ratio("theirs") == Ratio(1.0, 1.0, 1.0)
    assert entry([10], []).ratio("theirs") is None
    assert entry([10], [10]).ratio("nobody") is None


def test_over_nothing_there_is_no_ratio() -> None:
    assert entry([10], [0]).ratio("theirs") is None
    assert entry([0], [10], "less").ratio("theirs") is None


def test_the_best_is_the_most_or_the_least_as_it_may_be() -> None:
    assert entry([10], [20]).best() == "theirs"
    assert entry([10], [20], "less").best() == OURS
    assert entry([], []).best() is None


def test_a_loss_is_what_two_decimals_show() -> None:
    assert entry([0.99], [1]).is_lost()
    assert not entry([0.996], [1]).is_lost()
    assert entry([10], [9], "less").is_lost()
    assert not entry([], [9], "less").is_lost()


def test_another_setting_of_ours_is_no_loss() -> None:
    won = entry([10], [9])
    assert not replace(won, sides=won.sides | {f"{OURS} 2 s": Side([20])}).is_lost()


def test_to_lose_more_than_those_who_lose_nothing_is_a_loss() -> None:
    assert entry([1], [0], "less").is_lost()
    assert entry([0], [1], "more").is_lost()
    assert not entry([0], [0], "less").is_lost()


def test_a_later_run_replaces_what_it_has_measured_and_nothing_else() -> None:
    first = merge(Results(), "a", run(), [entry([1], [1], at=1), entry([2], [2], at=16)])
    second = merge(first, "b", run(), [entry([3], [3], of="b", at=16)])
    assert [(each.at, each.sides[OURS].rounds) for each in second.entries.values()] == [(1, [1]), (16, [3])]
    assert set(second.runs) == {"a", "b"}


def test_a_run_that_nothing_is_left_of_is_forgotten() -> None:
    first = merge(Results(), "a", run(), [entry([1], [1])])
    assert set(merge(first, "b", run(), [entry([3], [3], of="b")]).runs) == {"b"}


def test_merging_leaves_what_was_there_as_it_was() -> None:
    first = merge(Results(), "a", run(), [entry([1], [1])])
    merge(first, "b", run(), [entry([3], [3], of="b")])
    assert first.entries["dense/throughput/rate"].sides[OURS].rounds == [1]


def test_entries_are_found_by_what_they_are_of() -> None:
    results = merge(Results(), "a", run(), [entry([1], [1], at=16)])
    assert results.find("dense", "throughput", "rate", 16) is not None
    assert results.find("dense", "throughput", "rate") is None


def test_results_round_trip_through_the_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert load(file) == Results()
    results = merge(Results(), "a", run(), [entry([1.5], [], at=4)])
    save(file, results)
    assert load(file) == results
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"entries": 3}')
    with pytest.raises(ValueError, match="entries"):
        load(tmp_path / "other.json")
