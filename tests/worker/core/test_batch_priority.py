"""Lines of batches use what others leave: they give way within a step, and go on with the same text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from protocol.messages import Finished, StepOutputs
from protocol.types import BATCH_PRIORITY
from tests.worker.core.test_scheduler import add, carry_out, ids, phases, run, scheduler
from tests.worker.engines import CacheSpec, House, ScriptedEngine
from worker.core.failures import STARVED_S_MAX
from worker.core.rows import Phase

BATCH = BATCH_PRIORITY


def stepped(house: House) -> list[list[str]]:
    """Return the rows of each step that brought tokens."""
    return [[d.id for d in m.deltas] for m in house.published if isinstance(m, StepOutputs)]


@pytest.mark.parametrize("step", [3, 9])
@pytest.mark.parametrize("rows_max", [3, 4])
def test_batch_rows_give_up_places_only_and_go_on_with_the_same_text(step: int, rows_max: int) -> None:
    engine = ScriptedEngine(shape=CacheSpec())
    house = House(engine=engine, store_bytes=10**9, prefill_tokens=2048, rows_max=rows_max)
    scripts = {f"line{n}": tuple(range(100 * n + 1, 100 * n + 40)) for n in range(3)}
    for id, script in scripts.items():
        house.submit(id, *script, prompt=200, priority=BATCH)
    house.engine.at["step", step] = lambda: house.submit("chat", *range(900, 920), prompt=100)
    house.run()
    for id, script in scripts.items():
        assert house.text(id) == "".join(f"<{n}>" for n in script)
    assert next(m.id for m in house.published if isinstance(m, Finished)) == "chat"
    together = stepped(house)
    chatting = [rows for rows in together if "chat" in rows]
    assert together.index(chatting[0]) <= step + 2
    assert all(len(rows) == rows_max for rows in chatting[1:-1])
    assert ("line2" in house.engine.restored) == (rows_max == 3), "its prompt comes from the prefix store"
    assert house.engine.breaches == []


def test_batch_rows_go_on_without_a_prefix_store() -> None:
    house = House(prefill_tokens=64, rows_max=1)
    house.submit("line", *range(1, 40), prompt=30, priority=BATCH)
    house.engine.at["step", 9] = lambda: house.submit("chat", 7, 8, prompt=9)
    house.run()
    assert house.text("line") == "".join(f"<{n}>" for n in range(1, 40))
    assert house.text("chat") == "<7><8>"


@pytest.mark.parametrize("limits", [{"rows_max": 2}, {"bytes_max": 700, "row_bytes": lambda tokens: tokens}])
def test_who_waits_for_a_place_or_for_memory_gets_those_of_the_last_batch_row(limits: dict[str, Any]) -> None:
    s = scheduler(prefill_tokens=999, **limits)
    for id in ("one", "two"):
        add(s, id, 200, priority=BATCH)
    while s.count(Phase.DECODE) < 2:
        run(s)
    add(s, "chat", 9)
    plan = s.plan()
    assert [row.id for row in plan.preempted] == ["two"]
    assert [chunk.row.id for [chunk] in plan.groups] == ["chat"]
    carry_out(s, plan)
    assert phases(s) == {"one": Phase.DECODE, "two": Phase.WAITING, "chat": Phase.DECODE}
    assert ids(s) == []
    s.drop("chat")
    assert ids(s) == [["two"]]


def test_a_batch_prompt_in_prefill_gives_way() -> None:
    s = scheduler(prefill_tokens=64, rows_max=1)
    add(s, "line", 500, priority=BATCH)
    run(s)
    assert phases(s) == {"line": Phase.PREFILL}
    add(s, "later", 500, priority=BATCH)
    assert ids(s) == [["line"]], "batch rows do not give way to each other"
    add(s, "chat", 9)
    assert s.has_room(0)
    assert ids(s) == [["chat"]]
    assert phases(s)["line"] is Phase.WAITING
    s.drop("chat")
    assert ids(s) == [["line"]]


def test_a_steady_client_does_not_stop_a_batch() -> None:
    house = House(prefill_tokens=64, rows_max=2)
    house.submit("line", *range(1, 30), prompt=20, priority=BATCH)
    house.submit("chat", *range(1, 90), prompt=20)
    house.run()
    assert next(m.id for m in house.published if isinstance(m, Finished)) == "line"


def test_a_request_does_not_wait_for_the_prefix_of_a_batch_row() -> None:
    house = House(engine=ScriptedEngine(shape=CacheSpec()), store_bytes=10**9, prefill_tokens=64)
    prompt = tuple(range(1, 2000))
    house.submit("line", 5, tokens=prompt, priority=BATCH)
    house.engine.at["prefill", 2] = lambda: house.submit("chat", 7, tokens=(*prompt[:1500], 1))
    house.run()
    rows = [row for group in house.engine.groups for row in group]
    first, last = rows.index("chat"), len(rows) - rows[::-1].index("chat")
    assert first <= 3
    assert set(rows[first:last]) == {"chat"}


def test_waiting_for_other_requests_is_no_starvation() -> None:
    house = House(engine=ScriptedEngine(shape=CacheSpec()), store_bytes=10**9, rows_max=1)
    house.submit("line", *range(1, 30), prompt=20, priority=BATCH)
    house.engine.takes = lambda kind, size: setattr(house, "now", house.now + STARVED_S_MAX / 20)
    answer = itertools.chain(range(1, 90))
    house.engine.at["step", 3] = lambda: house.submit("chat", *answer, prompt=5)
    house.run()
    assert house.loop.counters.starved == 0
    assert house.text("line") == "".join(f"<{n}>" for n in range(1, 30))
