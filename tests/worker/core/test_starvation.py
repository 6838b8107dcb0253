"""A scheduler that loses a row: the row is restarted; if that fails, the worker exits."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.messages import Finished
from tests.worker.engines import House, ScriptedEngine
from worker.core.engine_core import PAUSE_S
from worker.core.failures import STARVED_S_MAX, RowStarved, starved_after_s
from worker.core.rows import Row
from worker.values import CacheSpec

PLENTY = 10**9


def _house(**options: Any) -> House:
    """Return a loop whose clock advances with each pause, and a little with each step."""
    house = House(**options)

    def turn() -> None:
        house.now += PAUSE_S

    def take(kind: str, size: int) -> None:
        house.now += 0.01

    house.inbox.on_wait = turn
    house.engine.takes = take
    return house


def test_row_lost_from_the_queue_of_the_scheduler_is_restarted_and_answered() -> None:
    house = _house(rows_max=1)
    scheduler = house.loop.scheduler
    house.submit("first", *range(1, 20))
    house.submit("lost", 7, 8, 9)

    def forget() -> None:
        row = scheduler.get("lost")
        assert row is not None
        del scheduler._in[row.phase][row]

    house.engine.at["step", 3] = forget
    house.run()
    assert house.text("lost") == "<7><8><9>"
    assert house.reason("lost") == "stop"
    assert house.loop.counters.starved == 1


def test_row_that_is_held_for_ever_is_restarted() -> None:
    engine = ScriptedEngine(shape=CacheSpec(has_states=True))
    house = _house(engine=engine, store_bytes=PLENTY, prefill_tokens=256)
    house.submit("first", 5, prompt=700)
    house.run()
    house.submit("held", 6, like="first")
    began = house.now
    add = house.loop.scheduler.add

    def add_held(*args: Any, **options: Any) -> Row:
        row = add(*args, **options)
        row.is_blocked = True
        return row

    house.loop.scheduler.add = add_held  # type: ignore[method-assign]
    house.run()
    assert house.text("held") == "<6>"
    assert STARVED_S_MAX < house.now - began < 1.2 * STARVED_S_MAX
    assert house.loop.counters.starved == 1


def test_row_that_waits_for_a_prefix_that_never_comes_computes_it() -> None:
    house = _house(engine=ScriptedEngine(shape=CacheSpec()), store_bytes=PLENTY, prefill_tokens=256)
    sharing = house.loop.scheduler._sharing
    assert sharing is not None
    prefix = tuple(range(1, 601))
    house.submit("first", *range(1, 30), tokens=(*prefix, 1))
    house.run()
    house.submit("second", 6, tokens=(*prefix, 2))

    def always(row: Row, others: object) -> Row | None:
        return None if row.never_waits else row

    sharing._awaited = always  # type: ignore[method-assign]
    house.run()
    assert house.text("second") == "<6>"
    assert house.loop.counters.starved == 1


def test_worker_ends_itself_when_a_restart_was_in_vain() -> None:
    house = _house()
    house.submit("fine", *range(1, 9))
    house.submit("lost", 7, 8)
    plan_line = house.loop.scheduler._line

    def forgetful(cache_bytes: int, preempted: list[Row]) -> list[Row]:
        return [row for row in plan_line(cache_bytes, preempted) if row.id != "lost"]

    house.loop.scheduler._line = forgetful  # type: ignore[method-assign]
    began = house.now
    with pytest.raises(RowStarved, match="lost"):
        house.loop.run()
    assert house.text("fine")
    assert isinstance(house.end("fine"), Finished)
    assert house.ends("lost") == []
    assert 2 * STARVED_S_MAX < house.now - began < 2.2 * STARVED_S_MAX


def test_row_whose_tokens_never_come_is_restarted_once_and_then_the_worker_ends() -> None:
    house = _house()
    house.submit("fine", *range(1, 9))
    house.submit("mute", 7, 8)
    step = house.engine.step

    def mute(*args: Any) -> Any:
        found = step(*args)
        found.tokens.pop("mute", None)
        if "mute" in house.engine.decoding:
            house.engine.decoding["mute"].number = 0
        return found

    house.engine.step = mute  # type: ignore[method-assign]
    with pytest.raises(RowStarved, match="mute"):
        house.loop.run()
    assert house.loop.counters.starved == 2


def test_bound_follows_a_short_stall_timeout() -> None:
    assert starved_after_s(None) == STARVED_S_MAX
    assert starved_after_s(4.0) == 1.0
    assert starved_after_s(3600.0) == STARVED_S_MAX
