"""Lock-step prefill: which prompts share calls, on engines with known costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories import engine_request
from worker.schedule.prefill_batches import LOCKSTEP_ROWS_MAX, CallShape, span_of
from worker.schedule.prefill_cost import (
    CALL_SHARE,
    CALLS_ALONE_MAX,
    CHUNK_TOKENS_MIN,
    PrefillBudget,
    PrefillCostModel,
    PrefillWork,
)
from worker.schedule.rows import Phase, work_of
from worker.schedule.scheduler import Scheduler, SchedulerConfig

TARGET_S = 0.1


def pace_of(column: float, token: float, call: float = 0.002, decode: float = 0.02) -> PrefillCostModel:
    """Return a cost model with known costs per column, token, call and decode step."""
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=2048)
    for turn in range(60):
        pace.learn(decode, decoded=True, work=PrefillWork())
        work = PrefillWork.call(1 + turn % 4, 16 << turn % 3, 0)
        pace.learn(call + column * work.width + token * work.tokens, decoded=False, work=work)
    return pace


def span(pace: PrefillCostModel, rooms: list[int], apart: CallShape) -> CallShape | None:
    return span_of(apart, rooms, 0, pace.budget(decoding=True))


def test_lockstep_cost_is_probed_now_and_then_within_the_budget() -> None:
    pace = pace_of(column=0.0, token=1e-3)
    for _ in range(CALLS_ALONE_MAX):
        assert span(pace, [500] * 4, CallShape(1, 48)) is None
        pace.learn(0.002 + 0.048, decoded=False, work=PrefillWork.call(1, 48, 0))
    found = span(pace, [500] * 4, CallShape(1, 48))
    assert found is not None
    assert 0.002 + 0.001 * found.rows * found.width <= CALL_SHARE * 0.02
    pace.learn(0.002 + 0.001 * found.rows * found.width, decoded=False, work=PrefillWork.call(*found, 0))
    assert span(pace, [500] * 4, CallShape(1, 48)) is None


@given(
    st.floats(0, 2e-3),
    st.floats(1e-6, 2e-3),
    st.lists(st.integers(0, 600), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 256),
)
@settings(max_examples=50)
def test_lockstep_shape_fits_the_remaining_prompts_and_the_step_budget(
    column: float, token: float, rooms: list[int], rows: int, width: int
) -> None:
    pace = pace_of(column, token)
    budget: PrefillBudget = pace.budget(decoding=True)
    found = span_of(CallShape(rows, width), rooms, 0, budget)
    if found is None:
        return
    assert rows < found.rows <= LOCKSTEP_ROWS_MAX
    assert found.width <= min(width, rooms[0])
    assert sum(room >= found.width for room in rooms) >= found.rows
    assert budget.holds(PrefillWork.call(*found, 0)) or found == CallShape(2, CHUNK_TOKENS_MIN)


class Engine:
    """Executes a scheduler's plans with known times, while other streams decode throughout."""

    def __init__(self, column: float, token: float, streams: int = 4) -> None:
        self.column, self.token, self.now = column, token, 0.0
        self.gaps: list[float] = []
        self.scheduler = Scheduler(SchedulerConfig(rows_max=128, inter_token_target_s=TARGET_S))
        self.came, self.streams = 0, streams
        for _ in range(streams):
            self.come(2)

    def come(self, tokens: int, priority: int = 0) -> None:
        prompt = (self.came, *range(1, tokens))
        request = engine_request(f"r{self.came}", prompt, max_tokens=10**9, priority=priority)
        self.scheduler.add(request, self.now)
        self.came += 1

    def step(self) -> None:
        began = self.now
        decodes = self.scheduler.decodes
        self.scheduler.on_step_end(self.now, decoded=None if not decodes else True)
        for group in self.scheduler.plan().groups:
            work = work_of(group)
            self.now += 0.002 + self.column * work.width + self.token * work.tokens
            self.scheduler.ran(group)
            for chunk in group:
                if chunk.last:
                    self.scheduler.started(chunk.row)
        if not decodes:
            self.scheduler.on_step_end(self.now, decoded=False)
            return
        for row in self.scheduler.decoding:
            self.scheduler.answered(row, 7)
        self.now += 0.01 + 2e-4 * self.scheduler.count(Phase.DECODE)
        self.gaps.append(self.now - began)

    def run(self) -> float:
        """Run every prompt and return the seconds. The rows that joined last have left by then."""
        began = self.now
        for _ in range(10_000):
            if not self.scheduler.count(Phase.WAITING, Phase.PREFILL, Phase.PREFILLED):
                break
            self.step()
        took = self.now - began
        for row in self.scheduler:
            if row.queue_key[1] >= self.streams:
                self.scheduler.drop(row.id)
        return took


@pytest.mark.parametrize("column", [1e-3, 2.5e-3])
def test_prompts_of_a_model_with_states_get_on_together_within_the_target(column: float) -> None:
    engine = Engine(column, token=column / 25)
    for _ in range(4):
        for _ in range(8):
            engine.step()
        for _ in range(16):
            engine.come(126)
        took = engine.run()
    alone = 16 * 125 * (column + column / 25)
    assert took < 0.75 * alone
    late = sum(gap > TARGET_S for gap in engine.gaps)
    assert late <= 0.03 * len(engine.gaps) + 1


def test_prompts_of_a_model_whose_tokens_cost_come_in_their_order() -> None:
    engine = Engine(column=0.0, token=1e-3)
    for _ in range(16):
        engine.come(126)
    first = next(row for row in engine.scheduler if row.id == "r4")
    last = next(row for row in engine.scheduler if row.id == "r19")
    while first.phase is not Phase.DECODE:
        engine.step()
    assert last.prefilled == 0
    engine.run()


def test_lockstep_prefill_does_not_mix_priorities() -> None:
    engine = Engine(column=2e-3, token=1e-5)
    for _ in range(8):
        engine.come(126)
    engine.run()
    engine.come(126, priority=-1)
    for _ in range(8):
        engine.come(126)
    urgent = next(row for row in engine.scheduler if row.queue_key[0] == -1)
    others = [row for row in engine.scheduler if row.phase is Phase.WAITING and row is not urgent]
    while urgent.left and urgent.phase is not Phase.DECODE:
        assert not any(row.prefilled for row in others)
        engine.step()
