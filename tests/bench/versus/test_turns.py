"""Alternating turns of the compared servers, and servers that fail."""

from __future__ import annotations

import asyncio

from bench.versus.results import OURS
from bench.versus.turns import Figure, Taken, Values, entries, take_turns, within


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


def test_figures_become_entries_with_all_sides_and_what_each_has_measured() -> None:
    figure = Figure("rate", "tokens/s", "", "more", 4)
    taken = {OURS: Taken([{"rate": 1.0, "gap": 5.0}, {}]), "other": Taken(note="not installed")}
    [entry] = entries("dense", "throughput", [figure], taken, "run")
    assert entry.key == "dense/throughput/rate/4"
    assert entry.sides[OURS].rounds == [1.0]
    assert (entry.sides["other"].rounds, entry.sides["other"].note) == ([], "not installed")
