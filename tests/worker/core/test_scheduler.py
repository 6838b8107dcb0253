"""Scheduling of rows in a step: first come, first served, within row limit and token budget."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import Code, RequestError
from tests.factories import engine_request
from worker.core.prefix.sharing import SHORT_TOKENS_MAX
from worker.core.rows import Phase, SchedulerOutput
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.values import EngineRequest


def request(id: str, prompt: int, *, first: int = 0, **fields: Any) -> EngineRequest:
    """Return a request whose prompt tokens are `first`, 1, 2…, so that each shows its position."""
    return engine_request(id, (first, *range(1, prompt)), **fields)


def scheduler(rows_max: int = 4, prefill_tokens: int = 8, **policy: Any) -> Scheduler:
    """Return a scheduler that has measured a decode step that took no time."""
    s = Scheduler(SchedulerConfig(rows_max=rows_max, prefill_tokens=prefill_tokens, **policy))
    s.on_step_end(0.0, decoded=True)
    return s


def add(s: Scheduler, id: str, prompt: int, **fields: Any) -> None:
    """Add a request with a prompt of its own."""
    s.add(request(id, prompt, first=1000 + len(s), **fields), now=0.0)


def carry_out(s: Scheduler, plan: SchedulerOutput, now: float | None = None) -> None:
    """Run a plan. `now`: the time after this step without decoding; otherwise decoding took no time."""
    for group in plan.groups:
        s.ran(group)
        for chunk in group:
            for row in (*chunk.copies, chunk.row) if chunk.last else ():
                s.started(row)
    s.on_step_end(now or 0.0, decoded=now is None)


def run(s: Scheduler) -> list[list[tuple[str, int, bool]]]:
    """Plan and execute one step; return its groups by id and number of tokens."""
    plan = s.plan()
    carry_out(s, plan)
    return [[(chunk.row.id, len(chunk.tokens), chunk.last) for chunk in group] for group in plan.groups]


def ids(s: Scheduler) -> list[list[str]]:
    return [[id for id, _, _ in group] for group in run(s)]


def phases(s: Scheduler) -> dict[str, Phase]:
    return {row.id: row.phase for row in s}


@pytest.mark.parametrize(("prompt", "sizes"), [(1, [0]), (5, [4]), (10, [4, 4, 1])])
def test_a_prompt_is_run_in_chunks_of_the_budget_but_its_last_token(prompt: int, sizes: list[int]) -> None:
    s = scheduler(prefill_tokens=4)
    add(s, "a", prompt)
    [*further, last] = sizes
    assert [run(s) for _ in sizes] == [*([[("a", size, False)]] for size in further), [[("a", last, True)]]]
    assert phases(s) == {"a": Phase.DECODE}
    assert run(s) == []


# --- order -------------------------------------------------------------------------------------------


def test_the_more_important_go_first_and_equals_in_the_order_they_came() -> None:
    s = scheduler(rows_max=1, prefill_tokens=99)
    for id, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0), ("e", -1)):
        add(s, id, 1, priority=priority)
    served = []
    while len(s):
        [[id]] = ids(s)
        served.append(id)
        s.drop(id)
    assert served == list("cebda")


def test_first_decode_step_runs_without_prefill() -> None:
    s = Scheduler(SchedulerConfig(rows_max=4, prefill_tokens=8))
    add(s, "a", 3)
    add(s, "b", 20)
    assert run(s)
    while not s.decoding:
        run(s)
    [first] = s.decoding
    s.answered(first, 7)
    assert run(s) == []  # paused: this step measures decoding
    s.on_step_end(0.01, decoded=True)
    assert run(s)


def test_the_more_important_is_prefilled_before_one_that_is_half_way() -> None:
    s = scheduler(prefill_tokens=4)
    add(s, "a", 13)
    run(s)
    add(s, "urgent", 5, priority=-1)
    assert run(s) == [[("urgent", 4, True)]]
    assert run(s) == [[("a", 4, False)]]


# --- batching ----------------------------------------------------------------------------------------


def warm(prefill_tokens: int = 4096, rows_max: int = 8, **policy: Any) -> Scheduler:
    """Return a scheduler that has measured a large prefill that took almost no time."""
    s = scheduler(rows_max=rows_max, prefill_tokens=prefill_tokens, **policy)
    for _ in range(4):
        add(s, "warming", 4097)
        while phases(s)["warming"] is not Phase.DECODE:
            run(s)
        s.drop("warming")
    return s


def test_short_prompts_of_like_length_are_run_together() -> None:
    s = warm()
    for id, prompt in (("a", 20), ("b", 200), ("c", 22), ("d", 190), ("e", 18)):
        add(s, id, prompt)
    assert ids(s) == [["a", "c", "e"], ["b", "d"]]


# --- short prompts beside a long one -----------------------------------------------------------------


def test_short_prompts_go_before_a_long_one_in_every_other_step() -> None:
    s = scheduler(rows_max=99, prefill_tokens=64)
    add(s, "long", 64 * 9 + 1)
    assert ids(s) == [["long"]]
    for number in range(4):
        add(s, f"{number}", 60 + number)
        add(s, f"{number} too", 60 + number)
        assert ids(s) == [[f"{number // 2}" + " too" * (number % 2)]]
        assert ids(s) == [["long"]]


@pytest.mark.parametrize(("length", "priority"), [(64 * 9 + 1, 1), (SHORT_TOKENS_MAX, 0)])
def test_short_prompts_of_lower_priority_or_beside_short_ones_do_not_pass(length: int, priority: int) -> None:
    s = scheduler(prefill_tokens=64)
    add(s, "first", length)
    add(s, "short", 40, priority=priority)
    assert [ids(s) for _ in range(3)] == [[["first"]]] * 3


# --- one prompt, several rows ------------------------------------------------------------------------


def test_of_equal_prompts_one_is_run_and_those_with_a_place_are_copies() -> None:
    s = scheduler(rows_max=2, prefill_tokens=64)
    for id in "abc":
        s.add(request(id, 100), 0.0)
    assert ids(s) == [["a"]]
    assert phases(s)["b"] is Phase.WAITING
    [[chunk]] = s.plan().groups
    assert chunk.last
    assert [row.id for row in chunk.copies] == ["b"]
    assert run(s) == [[("a", 35, True)]]
    assert phases(s) == {"a": Phase.DECODE, "b": Phase.DECODE, "c": Phase.WAITING}
    s.drop("a")
    assert run(s) == [[("c", 64, False)]]


def test_equal_prompts_with_different_salts_are_run_apart() -> None:
    s = scheduler(prefill_tokens=64)
    for id, salt in (("a", "ann"), ("b", "bob"), ("c", "ann")):
        s.add(request(id, 100, salt=salt), 0.0)
    assert ids(s) == [["a"]]
    [[chunk], *_] = s.plan().groups
    assert [row.id for row in chunk.copies] == ["c"]
    run(s)
    assert phases(s)["b"] is not Phase.DECODE


def test_prompts_that_merely_have_the_same_hash_are_strangers() -> None:
    s = scheduler(prefill_tokens=64)
    # -1 and -2 have the same hash in Python, as do tuples of them.
    for id, first in (("a", -1), ("b", -2)):
        s.add(request(id, 9, first=first), 0.0)
    assert hash((-1, 1)) == hash((-2, 1))
    assert ids(s) == [["a", "b"]]


# --- bytes -------------------------------------------------------------------------------------------


def a_byte_each(tokens: int) -> int:
    return tokens


def limited(bytes_max: int, **policy: Any) -> Scheduler:
    return scheduler(rows_max=8, prefill_tokens=128, bytes_max=bytes_max, row_bytes=a_byte_each, **policy)


def answer(s: Scheduler, id: str, count: int) -> bool:
    row = s.get(id)
    assert row is not None
    fits = [s.answered(row, 7) for _ in range(count)]
    return all(fits)


def test_a_prompt_that_never_fits_is_refused_with_what_would() -> None:
    s = limited(200)
    with pytest.raises(RequestError, match="context length is 191 tokens ") as caught:
        s.add(request("a", 192), 0.0)
    assert caught.value.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert len(s) == 0
    s.add(request("a", 191), 0.0)
    with pytest.raises(RequestError, match="length is 0 tokens"):
        limited(10).add(request("a", 5), 0.0)


def test_row_that_leaves_no_memory_for_growth_is_not_admitted() -> None:
    s = limited(64 * 5)
    add(s, "a", 100)
    add(s, "b", 60)
    add(s, "c", 10)
    # 128 for a, 64 to grow, 64 for b, 64 to grow: c would fit, but must leave room to grow.
    while s.count(Phase.PREFILL) or s.count(Phase.WAITING) > 1:
        run(s)
    assert phases(s) == {"a": Phase.DECODE, "b": Phase.DECODE, "c": Phase.WAITING}
    assert run(s) == []
    s.drop("b")
    assert ids(s) == [["c"]]


def test_the_youngest_of_the_least_important_makes_room() -> None:
    s = limited(64 * 6)
    for id, priority in (("a", 0), ("minor", 1), ("b", 0)):
        add(s, id, 40, priority=priority)
    while s.count(Phase.DECODE) < 3:
        run(s)
    preempted = []
    for _ in range(2):
        for id in [id for id, phase in phases(s).items() if phase is Phase.DECODE]:
            assert answer(s, id, 64)
        plan = s.plan()
        preempted.append([row.id for row in plan.preempted])
        carry_out(s, plan)
    assert preempted == [[], ["minor"]]
    assert phases(s) == {"a": Phase.DECODE, "b": Phase.DECODE, "minor": Phase.WAITING}


def test_caches_that_take_more_than_was_thought_cost_one_row_at_a_time() -> None:
    s = limited(64 * 9)
    for id in "abc":
        add(s, id, 10)
    run(s)
    preempted = [[row.id for row in s.plan(cache_bytes=10**6).preempted] for _ in range(9)]
    # After each preemption the engine has time to free the memory; the last row stays.
    assert preempted == [["c"], [], [], ["b"], [], [], [], [], []]


def test_a_row_that_surprised_is_not_let_in_only_to_be_preempted_again() -> None:
    s = limited(64 * 8)
    for id in ("a", "b"):
        add(s, id, 60)
    preempted = 0
    for _ in range(200):
        # Rows that run together are padded: two take three times what they take alone.
        cache_bytes = sum(row.bytes for row in s) * (3 if s.count(Phase.DECODE) > 1 else 1)
        plan = s.plan(cache_bytes)
        preempted += len(plan.preempted)
        carry_out(s, plan)
        for row in s:
            if row.phase is Phase.DECODE and row.length < 300:
                assert s.answered(row, 7)
    assert preempted == 1
    # A request that arrives after others have left is admitted in time.
    s.drop("a")
    for n in range(30):
        add(s, f"c{n}", 1)
        run(s)
        s.drop(f"c{n}")
    add(s, "d", 60)
    assert s.plan(cache_bytes=0).groups


def test_an_id_can_be_used_again_after_its_row_has_left_and_not_before() -> None:
    s = scheduler()
    add(s, "a", 5)
    with pytest.raises(ValueError, match="exists already"):
        add(s, "a", 3)
    s.drop("a")
    add(s, "a", 3)
    assert run(s) == [[("a", 2, True)]]
