"""Sessions: while memory is short, those that have begun go on before others begin, and nobody starves."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tests.factories import engine_request
from worker.core.rows import Phase, Row
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.core.sessions import HELD_S_MAX, IDLE_S, SESSIONS_MAX, Sessions

TURN = st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.integers(10, 1100), st.floats(0, 60))
"""Session, tokens of the prompt, and seconds until the next request comes."""


def _scheduler() -> Scheduler:
    config = SchedulerConfig(rows_max=8, bytes_max=1200, row_bytes=lambda tokens: tokens)
    scheduler = Scheduler(config)
    scheduler.on_step_end(0.0, decoded=None)
    return scheduler


def _run(scheduler: Scheduler, now: float, step_s: float = 1.0) -> float:
    """Run a step, in which each started row ends. Return the time of its end."""
    for row in scheduler.decoding:
        scheduler.drop(row.id)
    for group in scheduler.plan().groups:
        scheduler.ran(group)
        for chunk in group:
            if chunk.last:
                scheduler.started(chunk.row)
    scheduler.on_step_end(now + step_s, decoded=False)
    return now + step_s


def _add(scheduler: Scheduler, id: str, session: str, tokens: int, now: float, parent: str = "") -> Row:
    prompt = (hash((id, tokens)), *range(tokens - 1))
    return scheduler.add(engine_request(id, prompt, session=session, parent_session=parent), now)


def _turn(scheduler: Scheduler, id: str, session: str, tokens: int, now: float, parent: str = "") -> float:
    row = _add(scheduler, id, session, tokens, now, parent)
    while scheduler.get(row.id):
        now = _run(scheduler, now)
    return now


@given(st.lists(TURN, min_size=1, max_size=25))
def test_no_request_is_held_longer_than_its_bound(turns: list[tuple[str, int, float]]) -> None:
    scheduler, now = _scheduler(), 0.0
    for number, (session, tokens, pause_s) in enumerate(turns):
        _add(scheduler, f"r{number}", session, tokens, now)
        until = now + pause_s
        while now < until:
            now = _run(scheduler, now)
    last = now
    while len(scheduler):
        now = _run(scheduler, now)
        waiting = [row for row in scheduler if row.phase is Phase.WAITING]
        if not scheduler.count(Phase.PREFILL, Phase.DECODE):
            assert all(now - row.submitted_at <= HELD_S_MAX + 1 for row in waiting)
        assert now <= last + HELD_S_MAX + 200


def test_a_session_behind_its_tool_call_keeps_its_memory_for_a_while() -> None:
    scheduler = _scheduler()
    now = _turn(scheduler, "a1", "a", 700, 0.0)
    _add(scheduler, "b1", "b", 500, now)
    _run(scheduler, now)
    assert scheduler.count(Phase.WAITING) == 1
    assert not scheduler.has_room(0)
    small = _add(scheduler, "c1", "c", 10, now)
    now = _turn(scheduler, "a2", "a", 710, now)
    assert small.phase is not Phase.WAITING
    began = now
    while scheduler.count(Phase.WAITING):
        now = _run(scheduler, now)
    assert 0 < now - began < HELD_S_MAX


def test_an_idle_worker_does_not_wait_for_a_session_that_may_have_ended() -> None:
    scheduler, slow_s = _scheduler(), 10.0
    now = 0.0
    for number in range(5):  # prefill is expensive: a prompt is worth keeping for minutes
        _add(scheduler, f"a{number}", "a", 700, now)
        while scheduler.get(f"a{number}"):
            now = _run(scheduler, now, slow_s)
    ended = now
    _add(scheduler, "b", "b", 500, now)
    while scheduler.count(Phase.WAITING):
        now = _run(scheduler, now)
    assert now - ended <= IDLE_S + 1


def test_a_subagent_is_as_old_as_the_session_that_started_it() -> None:
    scheduler = _scheduler()
    now = _turn(scheduler, "a1", "a", 500, 0.0)
    _add(scheduler, "b1", "b", 500, now)
    now = _turn(scheduler, "s1", "s", 500, now, parent="a")
    assert scheduler.get("b1") is not None


def test_old_sessions_are_forgotten() -> None:
    sessions = Sessions()
    first = sessions.join("first", "", 0.0)
    first.count(-1, 0.0)
    first.nbytes, first.kept_s = 1, math.inf
    for number in range(SESSIONS_MAX):
        sessions.join(f"s{number}", "", 1.0)
    assert sessions.join("first", "", 1.0).number > first.number
    assert len(sessions._named) <= SESSIONS_MAX


def test_a_request_that_is_cancelled_before_it_runs_keeps_no_memory_for_its_session() -> None:
    scheduler = _scheduler()
    now = _turn(scheduler, "small", "c", 100, 0.0)
    _add(scheduler, "big", "a", 1000, now)
    scheduler.drop("big")
    _add(scheduler, "next", "b", 500, now)
    assert [chunk.row.id for group in scheduler.plan().groups for chunk in group] == ["next"]
