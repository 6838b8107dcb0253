"""Alternating turns of the compared servers, and servers that fail."""

from __future__ import annotations

import asyncio

from bench.versus.turns import Values, take_turns, within


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
