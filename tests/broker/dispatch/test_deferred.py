"""Queue of deferred work: a simulation of its users, and what counts as a free row."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from broker.dispatch.deferred import RETRY_S, RETRY_S_MAX, SPARE_SHARE, DeferredQueue, WorkSource, free_rows
from protocol.errors import Code, RequestError
from protocol.messages import Heartbeat
from protocol.supervisor_messages import ModelState, ModelStates
from protocol.types import BATCH_PRIORITY, MemoryPressure
from tests.broker.dispatcher_line import Line
from tests.factories import request

ROWS = {"a": 2, "b": 3}
OWNERS = ("limited", "free")
"""The first may have one response in flight."""
Work = tuple[str, str, int]
"""Model and owner of a response, or "batch" and the name of one; and a number."""


class World:
    """Responses, batches and interactive requests in the rows of two models."""

    def __init__(self) -> None:
        self.now, self.added, self.done = 0.0, 0, 0
        self.interactive = Counter(ROWS)
        self.waiting, self.running, self.cancelled = set[Work](), list[Work](), set[Work]()
        self.queue = DeferredQueue(self.free, lambda: self.now)

    def free(self, model: str | None) -> int:
        taken = self.interactive + Counter(work[0] for work in self.running)
        free = {name: max(0, rows - taken[name]) for name, rows in ROWS.items()}
        return max(1, sum(free.values())) if model is None else free[model]

    def lines_max(self) -> int:
        return int(self.free(None) * (1 + SPARE_SHARE))

    def add(self, kind: str, name: str, number: int) -> None:
        model = None if kind == "batch" else kind
        new = WorkSource(
            self.start, lambda work: _order(work)[1], model, lambda work, now: work in self.cancelled
        )
        work = kind, name, number
        self.queue.sources.setdefault((kind, name), new).waiting.append(work)
        self.waiting.add(work)
        self.added += 1

    def is_held(self, work: Work) -> bool:
        """Return whether a piece of work cannot begin now."""
        source = self.queue.sources[work[:2]]
        is_full = self.queue.lines >= self.lines_max() if work[0] == "batch" else not self.free(work[0])
        return is_full or self.now < source.retry_at

    def start(self, work: Work) -> bool:
        if work in self.cancelled:
            return True
        assert not self.is_held(work)
        first = [each for each in self.waiting if _order(each) < _order(work)]
        assert all(map(self.is_held, first)), "another one is first"
        if work[1] == "limited" and any(each[1] == "limited" for each in self.running):
            raise RequestError(Code.RATE_LIMIT_EXCEEDED)
        self.waiting.remove(work)
        self.running.append(work)
        self.queue.sources[work[:2]].in_flight += work[0] == "batch"
        return True

    def end(self, number: int, *, refused: bool = False) -> None:
        work = self.running.pop(number % len(self.running))
        source = self.queue.sources.get(work[:2])
        self.done += not (refused and work[0] == "batch")
        if source is not None and work[0] == "batch":
            source.in_flight -= 1
            if refused:
                source.waiting.appendleft(work)
                self.waiting.add(work)
                self.queue.refuse(source)
            else:
                source.retry_s = RETRY_S
        self.queue.freed()

    def step(self, kind: str, number: int) -> None:
        match kind:
            case "response":
                self.add("ab"[number % 2], OWNERS[number // 2 % 2], self.added)
            case "batch":
                for line in range(number):
                    self.add("batch", str(self.added - line), self.added)
            case "cancel" if found := sorted(work for work in self.waiting if work[0] != "batch"):
                self.cancelled.add(found[number % len(found)])
                self.waiting -= self.cancelled
            case "end" | "refuse" if self.running:
                self.end(number, refused=kind == "refuse")
            case "arrive":
                self.interactive["ab"[number % 2]] += 1
            case "leave":
                self.interactive -= Counter("ab"[number % 2])
                self.queue.freed()
            case "sweep":
                self.now += number / 4
                self.queue.sweep()
        self.queue.pump()
        for source in self.queue.sources.values():
            assert source.retry_at - self.now <= RETRY_S_MAX
        assert all(map(self.is_held, self.waiting)), "what can begin has begun"


def _order(work: Work) -> tuple[bool, float]:
    return (True, float(work[1])) if work[0] == "batch" else (False, work[2])


KINDS = st.sampled_from(["response", "batch", "cancel", "end", "refuse", "arrive", "leave", "sweep"])


@given(st.lists(st.tuples(KINDS, st.integers(0, 9)), max_size=60))
def test_all_work_begins_once_in_order_in_free_rows_alone(steps: list[tuple[str, int]]) -> None:
    world = World()
    for kind, number in steps:
        world.step(kind, number)
    world.interactive.clear()
    for _ in range(world.added + 1):
        while world.running:
            world.step("end", 0)
        world.step("sweep", 4 * int(RETRY_S_MAX))
    assert not world.waiting
    assert world.done == world.added - len(world.cancelled)
    assert world.queue.responses == world.queue.lines == 0


def test_the_delay_of_a_retry_doubles_up_to_its_bound_and_ends_with_a_request() -> None:
    world = World()
    world.add("a", "free", 0)
    [source] = world.queue.sources.values()
    delays = []
    for _ in range(7):
        world.queue.refuse(source)
        world.queue.refuse(source)
        delays.append(source.retry_at - world.now)
        world.now = source.retry_at
    assert delays == [1, 2, 4, 8, 16, RETRY_S_MAX, RETRY_S_MAX]
    world.queue.refuse(source)
    world.interactive.clear()
    world.queue.pump()
    assert not world.running
    world.queue.freed()
    assert world.running


def test_what_can_wait_does_and_other_replicas_come_first_while_a_machine_is_short_of_memory() -> None:
    line = Line()
    for name in ("w", "v"):
        line.serving(name, rows=2)
    pressure = MemoryPressure(level="critical", relief="refuse_long")
    line.say("w", Heartbeat(incarnation="w", running=0, waiting=0, steps=0, pressure=pressure))
    assert free_rows(line.dispatcher, "m") == 2
    attempts = [line.submit(request(id, prompt=id)).attempt for id in ("a", "b")]
    assert [attempt and attempt.worker for attempt in attempts] == ["v", "v"]
    line.say("w", Heartbeat(incarnation="w", running=0, waiting=0, steps=0, pressure=MemoryPressure()))
    assert free_rows(line.dispatcher, "m") == 2


def test_a_row_is_free_if_no_interactive_request_has_it_or_waits_for_one() -> None:
    line = Line()
    assert free_rows(line.dispatcher, None) == 1, "a line finds out which model there is"
    line.serving("w", rows=2)
    line.serving("v", "other", rows=3)
    assert [free_rows(line.dispatcher, model) for model in ("m", "other", "gone", None)] == [2, 3, 0, 5]
    line.submit(request("line", priority=BATCH_PRIORITY))
    line.submit(request("chat"))
    assert [free_rows(line.dispatcher, model) for model in ("m", None)] == [1, 4]
    line.dispatcher.lost("w")
    line.unreachable.add("u")
    line.serving("u", rows=2)
    assert [free_rows(line.dispatcher, model) for model in ("m", None)] == [0, 3]
    states = [ModelState(name="idle", stage="parked")]
    line.dispatcher.catalogue.on_model_states(ModelStates(models=states, on_demand=True))
    assert free_rows(line.dispatcher, "idle") == 1
    line.dispatcher.stop()
    assert [free_rows(line.dispatcher, model) for model in ("idle", None)] == [0, 0]
