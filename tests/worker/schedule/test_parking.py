"""Lines of batches give way to every other request within a step, and go on with the same text."""

from __future__ import annotations

import itertools

import pytest

from protocol.messages import Finished, StepOutputs
from protocol.types import BATCH_PRIORITY
from tests.worker.engines import CacheSpec, House, ScriptedEngine
from tests.worker.schedule.test_scheduler import add, carry_out, phases, scheduler
from worker.schedule.rows import Phase
from worker.schedule.starvation import STARVED_S_MAX

BATCH = BATCH_PRIORITY


def stepped(house: House) -> list[list[str]]:
    """Return the rows of each step that brought tokens."""
    return [[d.id for d in m.deltas] for m in house.published if isinstance(m, StepOutputs)]


@pytest.mark.parametrize("step", [3, 9])
def test_batch_rows_give_way_within_a_step_and_go_on_with_the_same_text(step: int) -> None:
    house = House(engine=ScriptedEngine(shape=CacheSpec()), store_bytes=10**9, prefill_tokens=2048)
    scripts = {f"line{n}": tuple(range(100 * n + 1, 100 * n + 40)) for n in range(3)}
    for id, script in scripts.items():
        house.submit(id, *script, prompt=200, priority=BATCH)
    house.engine.at["step", step] = lambda: house.submit("chat", *range(900, 920), prompt=100)
    house.run()
    for id, script in scripts.items():
        assert house.text(id) == "".join(f"<{n}>" for n in script)
    assert next(m.id for m in house.published if isinstance(m, Finished)) == "chat"
    together = stepped(house)
    chatting = [number for number, rows in enumerate(together) if "chat" in rows]
    first, last = chatting[0], chatting[-1]
    assert all(rows == ["chat"] for rows in together[first : last + 1])
    assert sum(len(rows) > 1 for rows in together[:first]) <= step + 1
    # Their prompts and answers come from the prefix store.
    assert all(house.engine.restored[id] >= 200 for id in scripts)
    assert house.engine.breaches == []


def test_batch_rows_go_on_without_a_prefix_store() -> None:
    house = House(prefill_tokens=64)
    house.submit("line", *range(1, 40), prompt=30, priority=BATCH)
    house.engine.at["step", 9] = lambda: house.submit("chat", 7, 8, prompt=9)
    house.run()
    assert house.text("line") == "".join(f"<{n}>" for n in range(1, 40))
    assert house.text("chat") == "<7><8>"


def test_a_batch_prompt_in_prefill_gives_way() -> None:
    s = scheduler(prefill_tokens=64)
    add(s, "line", 500, priority=BATCH)
    carry_out(s, s.plan())
    assert phases(s) == {"line": Phase.PREFILL}
    add(s, "chat", 9)
    [line] = s.giving_way()
    s.park(line)
    [[chunk]] = s.plan().groups
    assert chunk.row.id == "chat"
    assert phases(s)["line"] is Phase.WAITING
    s.drop("chat")
    [[chunk]] = s.plan().groups
    assert chunk.row.id == "line"
    assert s.giving_way() == []


def test_waiting_for_other_requests_is_no_starvation() -> None:
    house = House(engine=ScriptedEngine(shape=CacheSpec()), store_bytes=10**9)
    house.submit("line", *range(1, 30), prompt=20, priority=BATCH)
    house.engine.takes = lambda kind, size: setattr(house, "now", house.now + STARVED_S_MAX / 20)
    answer = itertools.chain(range(1, 90))
    house.engine.at["step", 3] = lambda: house.submit("chat", *answer, prompt=5)
    house.run()
    assert house.loop.counters.starved == 0
    assert house.text("line") == "".join(f"<{n}>" for n in range(1, 30))
