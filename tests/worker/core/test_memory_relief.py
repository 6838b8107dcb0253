"""Memory relief: the policy over any course of pressure, and what the core does at each stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import Code
from protocol.messages import Failed
from tests.worker.engines import House, ScriptedEngine
from worker.core.commands import RelieveMemory
from worker.core.memory_relief import CALM_S, LONG_TOKENS, SHRUNK_SHARE, STEP_S, Relief, ReliefPolicy
from worker.process.memory_pressure import PressureLevel
from worker.values import CacheSpec

Course = Sequence[tuple[float, PressureLevel]]
"""Seconds since the last look, and the level then."""
COURSES = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, STEP_S, CALM_S]), st.sampled_from(PressureLevel)), max_size=40
)


def stages(course: Course) -> list[tuple[float, Relief]]:
    policy, now, seen = ReliefPolicy(), 0.0, []
    for passed_s, level in course:
        now += passed_s
        policy.observe(level, now)
        seen.append((now, policy.stage))
    return seen


@given(COURSES)
def test_after_any_course_calm_brings_everything_back(course: Course) -> None:
    calm = [(1.0, PressureLevel.NONE)] * int(1 + CALM_S * Relief.REFUSE_LONG)
    assert stages([*course, *calm])[-1][1] is Relief.NONE


@given(COURSES)
def test_a_stage_that_has_risen_stays_for_the_calm_time(course: Course) -> None:
    changed_at = -CALM_S
    for (_, before), (now, after) in pairwise([(0.0, Relief.NONE), *stages(course)]):
        assert after >= before or now - changed_at >= CALM_S
        assert after >= before - 1
        changed_at = now if after != before else changed_at


@given(COURSES)
def test_nothing_happens_without_pressure_and_nothing_is_refused_without_lasting_critical_one(
    course: Course,
) -> None:
    critical_since = None
    for (now, stage), (_, level) in zip(stages(course), course, strict=True):
        if level is PressureLevel.CRITICAL:
            critical_since = now if critical_since is None else critical_since
        worst = max(each for _, each in course)
        assert worst or stage is Relief.NONE
        assert worst > PressureLevel.WARNING or stage <= Relief.SHRINK
        is_lasting = critical_since is not None and now - critical_since >= STEP_S
        assert is_lasting or stage < Relief.REFUSE_LONG
        assert stage >= level


@given(COURSES, st.lists(st.sampled_from(PressureLevel), min_size=40, max_size=40))
def test_less_pressure_never_means_more_relief(course: Course, levels: list[PressureLevel]) -> None:
    less = [(s, min(level, other)) for (s, level), other in zip(course, levels, strict=False)]
    assert all(a <= b for (_, a), (_, b) in zip(stages(less), stages(course), strict=True))


def test_lasting_pressure_has_what_is_idle_dropped_again_and_a_stage_is_told_once() -> None:
    policy = ReliefPolicy()
    told = [(now, policy.observe(PressureLevel.CRITICAL, now)) for now in map(float, range(31))]
    assert [each for each in told if each[1] is not None] == [
        (0.0, Relief.DROP_IDLE), (10.0, Relief.REFUSE_LONG), (20.0, Relief.REFUSE_LONG),
        (30.0, Relief.REFUSE_LONG),
    ]  # fmt: skip
    assert (policy.status.level, policy.status.relief) == ("critical", "refuse_long")
    told = [(now, policy.observe(PressureLevel.NONE, now)) for now in map(float, range(31, 130))]
    assert [each for each in told if each[1] is not None] == [
        (60.0, Relief.DROP_IDLE), (90.0, Relief.SHRINK), (120.0, Relief.NONE),
    ]  # fmt: skip


# --- in the core -------------------------------------------------------------------------------------


def house(**settings: int) -> House:
    return House(engine=ScriptedEngine(shape=CacheSpec()), store_bytes=2**20, **settings)


def test_caches_shrink_then_idle_prefixes_go_and_all_of_it_may_come_back() -> None:
    ours = house(image_bytes_max=100)
    assert ours.store is not None
    ours.submit("a", 5, prompt=60, images=[("cat", 2, 8)])
    ours.run()
    held, full = ours.store.status().ram_bytes, ours.store.status().ram_limit
    assert held
    assert ours.engine.kept
    for stage, limit, left in (
        (Relief.SHRINK, int(SHRUNK_SHARE * full), held),
        (Relief.DROP_IDLE, int(SHRUNK_SHARE * full), 0),
        (Relief.NONE, full, 0),
    ):
        ours.inbox.put(RelieveMemory(stage))
        ours.run()
        assert (ours.store.status().ram_limit, ours.store.status().ram_bytes) == (limit, left)
        assert not ours.engine.kept


def texts(*, refusing: bool) -> dict[str, str]:
    """Return the texts of requests that come while another one is streamed, and of a next turn behind."""
    ours = house()
    ours.submit("streams", *range(1, 40), prompt=LONG_TOKENS + 30)

    def ask() -> None:
        if refusing:
            ours.inbox.put(RelieveMemory(Relief.REFUSE_LONG))
        ours.submit("short", 7, prompt=LONG_TOKENS)
        ours.submit("resumed", 9, 10, prompt=LONG_TOKENS + 1, resume=(9,))
        ours.submit("long", 8, prompt=LONG_TOKENS + 1)

    ours.engine.at["step", 10] = ask
    ours.run()
    ours.submit("next turn", 11, tokens=(*ours.engine.prompts["short"], 7, 77))
    ours.run()
    end = ours.end("long")
    if refusing:
        assert isinstance(end, Failed)
        assert (end.code, end.retry_after_s) == (Code.TEXT_GENERATION_BUSY, CALM_S)
        assert "short of memory" in end.message
    return {id: ours.text(id) for id in ours.engine.prompts if not ours.failed(id)}


def test_only_new_long_prompts_are_refused_with_a_reason_and_texts_are_the_same() -> None:
    plain = texts(refusing=False)
    assert plain.pop("long")
    assert texts(refusing=True) == plain
