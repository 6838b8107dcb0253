"""A request that crashes its worker among harmless ones, and worker crashes at arbitrary times."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.dispatch.failover import CRASHES_MAX
from broker.dispatch.flight import PROVEN_PIECES, Flight
from protocol.errors import Code
from protocol.messages import Cancel, Finished, Generate
from protocol.types import Delta, RequestStatus
from tests.broker.dispatcher_line import Line, code_of
from tests.factories import accepted, events, finished, request, reused

STEP_S = 0.05
TOKENS = 9
PREFILL = -1
"""Fatal token of a request that kills the worker during prefill."""
NEVER = 10**9
BEAT_STEPS = 5
STEPS_MAX = 40_000


class Works:
    """Worker that decodes a token per row and step, and crashes at the poison request's token `fatal`.

    Requests beyond `rows` wait in it. The deltas of its last `tail` steps are lost with it, and its successor
    starts at once.
    """

    def __init__(self, line: Line, *, fatal: int = NEVER, tail: int = 0, rows: int = 64) -> None:
        self.line, self.fatal, self.tail, self.rows_max = line, fatal, tail, rows
        self.crashes = self.steps = 0
        self._start()

    def _start(self) -> None:
        self.name = f"w{self.crashes}"
        self.rows: dict[str, list[int]] = {}
        self.unsaid: list[list[Delta]] = []
        self.line.serving(self.name, rows=self.rows_max)

    def step(self, *, pulled: bool = False) -> None:
        self.line.clock.now += STEP_S
        self._take()
        if pulled or self._is_killed():
            self.crashes += 1
            self.line.dispatcher.lost(self.name)
            self._start()
        else:
            self._work()
        self.line.dispatcher.sweep()

    def _take(self) -> None:
        for message in self.line.sent_to(self.name):
            if isinstance(message, Generate):
                self.rows[message.id] = [len(message.resume), 0]
                self.line.say(self.name, accepted(self.name, message.id))
            elif isinstance(message, Cancel):
                self.rows.pop(message.id, None)

    def _is_killed(self) -> bool:
        running = list(self.rows.items())[: self.rows_max]
        at = [at for id, (at, _) in running if id.startswith("poison")]
        return bool(at) if self.fatal == PREFILL else self.fatal in at

    def _work(self) -> None:
        said = []
        for id, row in list(self.rows.items())[: self.rows_max]:
            if not row[1]:
                self.line.say(self.name, reused(self.name, id))
            if row[0] < TOKENS:
                said.append(Delta(id=id, sequence=row[1], tokens=[row[0]], text=f"{row[0]} "))
                row[0], row[1] = row[0] + 1, row[1] + 1
        self.unsaid.append(said)
        if len(self.unsaid) > self.tail or not said:
            self._say()
        self.steps += 1
        if self.steps % BEAT_STEPS == 0:
            rows = [RequestStatus(id=id, phase="decode", prompt_tokens=3) for id in self.rows]
            self.line.beat(self.name, running=len(rows), steps=self.steps, rows=rows)

    def _say(self) -> None:
        count = max(1, len(self.unsaid) - self.tail)
        for deltas in self.unsaid[:count]:
            self.line.say(self.name, replace(events(self.name, "x"), deltas=deltas))
        del self.unsaid[:count]
        if not any(self.unsaid):
            for id in [id for id, row in self.rows.items() if row[0] == TOKENS]:
                del self.rows[id]
                self.line.say(self.name, finished(self.name, id, TOKENS))


def submit(line: Line, *ids: str) -> list[Flight]:
    return [line.submit(request(id, prompt=id)) for id in ids]


def assert_whole(flights: list[Flight]) -> None:
    for flight in flights:
        assert isinstance(flight.terminal, Finished)
        texts = [item.text for item in flight.take() if isinstance(item, Delta)]
        assert texts == [f"{number} " for number in range(TOKENS)]


def until_over(works: Works, flights: list[Flight]) -> None:
    for _ in range(STEPS_MAX):
        if all(flight.terminal is not None for flight in flights):
            return
        works.step()
    raise AssertionError("a request hangs")


tails = st.integers(0, PROVEN_PIECES - 1)


@settings(max_examples=12)
@given(
    before=st.integers(0, 25),
    after=st.integers(0, 25),
    fatal=st.integers(PREFILL, TOKENS - 1),
    tail=tails,
    rows=st.integers(1, 64),
    choices=st.integers(1, 3),
    start=st.integers(0, 6),
)
@example(before=25, after=25, fatal=PREFILL, tail=1, rows=16, choices=1, start=6)
@example(before=25, after=25, fatal=7, tail=1, rows=16, choices=1, start=6)
def test_poison_costs_three_deaths_at_most_and_no_innocent_anything(
    before: int, after: int, fatal: int, tail: int, rows: int, choices: int, start: int
) -> None:
    line = Line(waiting_max=64)
    works = Works(line, fatal=fatal, tail=tail, rows=max(rows, choices))
    innocents = submit(line, *(f"i{number}" for number in range(before)))
    for _ in range(start):
        works.step()
    requests = [request(f"poison{number}", prompt="poison") for number in range(choices)]
    line.contexts.append(line.dispatcher.submit(line.dispatcher.find("m"), requests, ()))
    poison = line.contexts[-1].__enter__()
    innocents += submit(line, *(f"i{number}" for number in range(before, before + after)))
    until_over(works, [*poison, *innocents])
    assert [code_of(flight) for flight in poison] == [Code.WORKER_CRASHED] * choices
    assert works.crashes <= CRASHES_MAX
    assert_whole(innocents)


@settings(max_examples=12)
@given(
    fatal=st.integers(PREFILL, TOKENS - 1),
    tail=tails,
    pulls=st.lists(st.integers(0, 60), max_size=8),
    count=st.integers(0, 8),
)
@example(fatal=2, tail=0, pulls=[0] * 6, count=1)
def test_poison_is_found_out_although_somebody_pulls_the_plug(
    fatal: int, tail: int, pulls: list[int], count: int
) -> None:
    line = Line(waiting_max=64)
    works = Works(line, fatal=fatal, tail=tail, rows=4)
    [poison, *others] = submit(line, "poison", *(f"i{number}" for number in range(count)))
    for gap in pulls:
        for _ in range(gap):
            works.step()
        works.step(pulled=True)
    until_over(works, [poison, *others])
    assert code_of(poison) == Code.WORKER_CRASHED
    # One more than it may cause: while a request is tried that was pulled out, one that runs on beside it is
    # not taken for the cause.
    assert works.crashes <= len(pulls) + CRASHES_MAX + 1


@settings(max_examples=25)
@given(
    gaps=st.lists(st.integers(0, 100), min_size=1, max_size=CRASHES_MAX - 1),
    count=st.integers(1, 6),
    rows=st.integers(1, 6),
    tail=tails,
)
def test_fewer_crashes_than_the_limit_fail_no_request(
    gaps: list[int], count: int, rows: int, tail: int
) -> None:
    line = Line(waiting_max=64)
    works = Works(line, tail=tail, rows=rows)
    flights = submit(line, *(f"i{number}" for number in range(count)))
    for gap in gaps:
        for _ in range(gap):
            works.step()
        works.step(pulled=True)
    until_over(works, flights)
    assert_whole(flights)


def test_request_waiting_for_a_row_is_not_blamed_for_a_second_crash() -> None:
    line = Line(waiting_max=64)
    works = Works(line, rows=2)
    flights = submit(line, *(f"i{number}" for number in range(6)))
    for _ in range(2):
        works.step()
        works.step(pulled=True)
    assert [flight.crash_count for flight in flights] == [2, 1, 1, 1, 1, 1]
    until_over(works, flights)
    assert_whole(flights)
