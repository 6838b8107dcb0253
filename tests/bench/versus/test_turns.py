"""Alternating turns of the compared servers, and servers that fail."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from bench.rivals import NotServing
from bench.versus.results import OURS
from bench.versus.turns import NOTE_MAX, Figure, Taken, Values, describe, entries, take_turns, within


def test_everybody_has_a_turn_in_each_round_and_another_one_begins() -> None:
    order: list[tuple[int, str]] = []

    def noting(name: str) -> object:
        return lambda number: order.append((number, name)) or {"rate": float(number)}

    sides = {name: noting(name) for name in "ab"}
    taken = take_turns(sides, 2)  # type: ignore[arg-type]
    assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert taken["a"].rounds == [{"rate": 1.0}, {"rate": 2.0}]
    assert take_turns(sides, 1, warm=False)["b"].rounds == [{"rate": 1.0}]  # type: ignore[arg-type]


def test_a_side_that_fails_or_hangs_costs_its_own_figures_and_has_no_more_turns() -> None:
    asked: list[int] = []

    def failing(number: int) -> Values:
        asked.append(number)
        if number == 2:
            raise ConnectionError("gone")
        return {"rate": 1.0}

    async def hang() -> Values:
        await asyncio.Event().wait()
        return {}

    sides = {
        "fails": failing,
        "hangs": lambda number: within(hang(), 0.01),
        "stays": lambda number: {"rate": 2.0},
    }
    taken = take_turns(sides, 3)
    assert asked == [0, 1, 2]
    assert taken["fails"].rounds == [{"rate": 1.0}]
    assert {name: side.note for name, side in taken.items()} == {
        "fails": "round 2: ConnectionError: gone",
        "hangs": "round 0: TimeoutError",
        "stays": None,
    }
    assert len(taken["stays"].rounds) == 3


def test_a_mistake_of_our_own_is_no_failure_of_a_side() -> None:
    def mistaken(number: int) -> Values:
        raise TypeError("not so")

    with pytest.raises(TypeError):
        take_turns({"a": mistaken}, 1)


def test_a_failure_is_told_in_a_line_by_its_first_cause() -> None:
    inner = ExceptionGroup("inner", [ValueError("two\nlines"), OSError("other")])
    assert describe(ExceptionGroup("outer", [inner])) == "ValueError: two lines"
    assert describe(NotServing("it has ended: no such module")) == "it has ended: no such module"
    request, response = httpx.Request("POST", "http://h/"), httpx.Response(404)
    assert describe(httpx.HTTPStatusError("long", request=request, response=response)) == "HTTP status 404"
    assert len(describe(RuntimeError("x" * 1000))) == NOTE_MAX


def test_figures_become_entries_with_all_sides_and_what_each_has_measured() -> None:
    figure = Figure("rate", "tokens/s", "", "more", 4)
    taken = {OURS: Taken([{"rate": 1.0, "gap": 5.0}, {}]), "other": Taken(note="not installed")}
    [entry] = entries("dense", "throughput", [figure], taken, "run")
    assert entry.key == "dense/throughput/rate/4"
    assert entry.sides[OURS].rounds == [1.0]
    assert (entry.sides["other"].rounds, entry.sides["other"].note) == ([], "not installed")
