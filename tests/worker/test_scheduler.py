"""Who runs in a step: first come first served, within the rows and the budget there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.contract import Draw, Prepared
from worker.scheduler import Phase, Scheduler


def request(id: str, prompt: int) -> Prepared:
    """A prompt whose tokens are 0, 1, 2…: each says where it belongs."""
    return Prepared(
        id=id, tokens=tuple(range(prompt)), draw=Draw(), stop=(), max_tokens=9, end_tokens=frozenset()
    )


def scheduler(rows_max: int = 4, prefill_tokens: int = 8) -> Scheduler:
    return Scheduler(rows_max=rows_max, prefill_tokens=prefill_tokens)


def run(s: Scheduler) -> list[tuple[str, tuple[int, ...], bool]]:
    """One step, carried out; its chunks by id."""
    plan = s.plan()
    for chunk in plan.chunks:
        s.ran(chunk)
    return [(chunk.row.request.id, chunk.tokens, chunk.last) for chunk in plan.chunks]


def phases(s: Scheduler) -> dict[str, Phase]:
    return {row.request.id: row.phase for row in s}


# --- one thing at a time -----------------------------------------------------------------------------


def test_with_nothing_to_do_there_is_no_step() -> None:
    assert not scheduler().plan()


def test_a_prompt_is_run_but_for_its_last_token() -> None:
    s = scheduler()
    s.add(request("a", 5))
    assert run(s) == [("a", (0, 1, 2, 3), True)]
    assert phases(s) == {"a": Phase.DECODE}
    plan = s.plan()
    assert plan.decode
    assert plan.chunks == []


def test_a_prompt_of_one_token_starts_without_a_prefill() -> None:
    s = scheduler()
    s.add(request("a", 1))
    assert run(s) == [("a", (), True)]
    assert phases(s) == {"a": Phase.DECODE}


def test_a_long_prompt_is_run_in_chunks_of_the_budget() -> None:
    s = scheduler(prefill_tokens=4)
    s.add(request("a", 10))
    assert run(s) == [("a", (0, 1, 2, 3), False)]
    assert run(s) == [("a", (4, 5, 6, 7), False)]
    assert run(s) == [("a", (8,), True)]


def test_a_prompt_that_fills_the_budget_exactly_is_done_with_it() -> None:
    s = scheduler(prefill_tokens=4)
    s.add(request("a", 5))
    assert run(s) == [("a", (0, 1, 2, 3), True)]


def test_what_is_left_of_the_budget_goes_to_the_next_in_line() -> None:
    s = scheduler(prefill_tokens=6)
    for id in "abc":
        s.add(request(id, 5))
    assert run(s) == [("a", (0, 1, 2, 3), True), ("b", (0, 1), False)]
    assert run(s) == [("b", (2, 3), True), ("c", (0, 1, 2, 3), True)]


def test_a_row_that_starts_costs_something_even_without_a_prefill() -> None:
    s = scheduler(rows_max=9, prefill_tokens=3)
    for id in "abcde":
        s.add(request(id, 1))
    assert [id for id, _, _ in run(s)] == ["a", "b", "c"]
    assert [id for id, _, _ in run(s)] == ["d", "e"]


def test_no_more_rows_run_than_there_are_places() -> None:
    s = scheduler(rows_max=2, prefill_tokens=100)
    for id in "abc":
        s.add(request(id, 3))
    assert [id for id, _, _ in run(s)] == ["a", "b"]
    assert run(s) == []
    assert phases(s)["c"] is Phase.WAITING
    s.drop("a")
    assert [id for id, _, _ in run(s)] == ["c"]


def test_a_row_in_prefill_holds_its_place() -> None:
    s = scheduler(rows_max=1, prefill_tokens=2)
    s.add(request("a", 9))
    s.add(request("b", 1))
    for _ in range(4):
        assert [id for id, _, _ in run(s)] == ["a"]
    assert run(s) == []
    assert phases(s) == {"a": Phase.DECODE, "b": Phase.WAITING}


def test_decoding_goes_on_while_others_prefill() -> None:
    s = scheduler(prefill_tokens=2)
    s.add(request("a", 1))
    run(s)
    s.add(request("b", 9))
    plan = s.plan()
    assert plan.decode
    assert [chunk.row.request.id for chunk in plan.chunks] == ["b"]


# --- leaving -----------------------------------------------------------------------------------------


def test_a_dropped_row_is_gone_whatever_its_phase() -> None:
    s = scheduler(rows_max=2, prefill_tokens=4)
    for id, prompt in (("decoding", 1), ("prefilling", 9), ("waiting", 9)):
        s.add(request(id, prompt))
    run(s)
    assert list(phases(s).values()) == [Phase.DECODE, Phase.PREFILL, Phase.WAITING]
    for id in list(phases(s)):
        row = s.get(id)
        assert s.drop(id) is row
        assert s.drop(id) is None
        assert s.get(id) is None
    assert len(s) == 0
    assert not s.plan()


def test_an_id_can_be_used_again_after_its_row_has_left_and_not_before() -> None:
    s = scheduler()
    s.add(request("a", 5))
    with pytest.raises(ValueError, match="there already"):
        s.add(request("a", 3))
    s.drop("a")
    s.add(request("a", 3))
    assert run(s) == [("a", (0, 1), True)]


def test_after_a_rewind_a_prompt_begins_anew() -> None:
    s = scheduler(prefill_tokens=4)
    s.add(request("a", 10))
    run(s)
    s.rewind()
    assert run(s) == [("a", (0, 1, 2, 3), False)]


def test_rows_are_counted_by_phase() -> None:
    s = scheduler(rows_max=2, prefill_tokens=4)
    for id, prompt in (("a", 1), ("b", 9), ("c", 9), ("d", 9)):
        s.add(request(id, prompt))
    run(s)
    assert s.count(Phase.WAITING) == 2
    assert s.count(Phase.PREFILL, Phase.DECODE) == 2
    assert s.count(*Phase) == len(s) == 4


# --- simulated ---------------------------------------------------------------------------------------


FURTHER = [Phase.WAITING, Phase.PREFILL, Phase.DECODE]


@dataclass
class Simulation:
    """A scheduler, and a second account of what its rows have been through."""

    rows_max: int
    prefill_tokens: int
    scheduler: Scheduler = field(init=False)
    came: list[str] = field(default_factory=list)
    """Everyone who is here, in the order in which they came."""
    ran: dict[str, list[int]] = field(default_factory=dict)
    """The prompt tokens that are in a row's cache."""
    prompts: dict[str, int] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(rows_max=self.rows_max, prefill_tokens=self.prefill_tokens)

    def add(self, prompt: int) -> None:
        id = f"r{len(self.prompts)}"
        self.prompts[id], self.ran[id] = prompt, []
        self.came.append(id)
        row = self.scheduler.add(request(id, prompt))
        assert row.phase is Phase.WAITING

    def drop(self, number: int) -> None:
        if self.came:
            id = self.came.pop(number % len(self.came))
            assert self.scheduler.drop(id) is not None

    def step(self, fails: bool = False) -> None:
        plan = self.scheduler.plan()
        decoding = [row for row in self.scheduler if row.phase is Phase.DECODE]
        assert plan.decode == bool(decoding)
        # Somebody always gets on, as long as anybody is here.
        assert bool(plan) == bool(self.came)
        if fails and plan.decode:
            for row in decoding:
                self.scheduler.drop(row.request.id)
                self.came.remove(row.request.id)
            self.scheduler.rewind()
            for row in self.scheduler:
                self.ran[row.request.id] = []
        else:
            self.check_budget([len(chunk.tokens) for chunk in plan.chunks])
            for chunk in plan.chunks:
                id = chunk.row.request.id
                self.ran[id] += chunk.tokens
                assert self.ran[id] == list(range(len(self.ran[id])))
                assert chunk.last == (len(self.ran[id]) == self.prompts[id] - 1)
                self.scheduler.ran(chunk)
            for row in decoding:
                self.steps[row.request.id] += 1
        self.check()

    def check_budget(self, sizes: list[int]) -> None:
        assert sum(sizes) <= self.prefill_tokens
        assert len(sizes) <= self.prefill_tokens

    def check(self) -> None:
        rows = list(self.scheduler)
        assert [row.request.id for row in rows] == self.came
        assert self.scheduler.count(Phase.PREFILL, Phase.DECODE) <= self.rows_max
        assert [row.prefilled for row in rows] == [len(self.ran[row.request.id]) for row in rows]
        # Nobody overtakes: whoever came earlier is at least as far, and no two are half way.
        far = [FURTHER.index(row.phase) for row in rows]
        assert far == sorted(far, reverse=True)
        assert sum(row.prefilled > 0 and row.phase is Phase.PREFILL for row in rows) <= 1


STEPS = st.one_of(
    st.builds(lambda prompt: ("add", prompt), st.one_of(st.integers(1, 4), st.integers(1, 60))),
    st.builds(lambda number: ("drop", number), st.integers(0, 99)),
    st.just(("step", 0)),
    st.just(("step", 0)),
    st.just(("fail", 0)),
)


@given(st.integers(1, 5), st.integers(1, 16), st.lists(STEPS, min_size=10, max_size=80))
@settings(max_examples=400, deadline=None)
def test_whatever_comes_and_goes_the_rules_hold_and_everyone_gets_to_decode(
    rows_max: int, prefill_tokens: int, history: list[tuple[str, int]]
) -> None:
    simulation = Simulation(rows_max, prefill_tokens)
    for what, number in history:
        match what:
            case "add":
                simulation.add(number)
            case "drop":
                simulation.drop(number)
            case "step":
                simulation.step()
            case "fail":
                simulation.step(fails=True)
    # Each in its turn decodes a few steps and leaves.
    left = sum(simulation.prompts.values()) + 8 * len(simulation.prompts)
    before = Counter(simulation.steps)
    while simulation.came and left > 0:
        simulation.step()
        left -= 1
        for id in [id for id in simulation.came if simulation.steps[id] >= before[id] + 3]:
            simulation.drop(simulation.came.index(id))
    assert simulation.came == []
    assert len(simulation.scheduler) == 0


def test_a_plan_that_was_not_carried_out_is_made_again() -> None:
    s = scheduler(prefill_tokens=4)
    s.add(request("a", 10))
    assert [chunk.tokens for chunk in s.plan().chunks] == [(0, 1, 2, 3)]
    assert [chunk.tokens for chunk in s.plan().chunks] == [(0, 1, 2, 3)]
