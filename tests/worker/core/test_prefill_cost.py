"""Prefill budget of a step, against simulated engines with known speeds."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories import engine_request
from worker.core.prefill import (
    CALL_SHARE,
    CHUNK_TOKENS_FIRST,
    CHUNK_TOKENS_MIN,
    IDLE_S,
    PrefillCall,
    PrefillCostModel,
    call_of,
)
from worker.core.rows import Group, Phase
from worker.core.scheduler import BURST_S, Scheduler, SchedulerConfig

TARGET_S = 0.1


@dataclass(frozen=True)
class Speed:
    """Seconds per call, token and pair of a token and an earlier one; per decode step and row in it."""

    call: float
    token: float
    reach: float
    decode: float
    row: float

    def prefill_s(self, call: PrefillCall) -> float:
        reach = self.reach * (call.context + call.tokens / 2)
        return self.call + call.tokens * (self.token + reach)

    def decode_s(self, rows: int) -> float:
        return self.decode + self.row * rows if rows else 0.0


SPEEDS = {
    "small model": Speed(0.002, 2e-5, 2e-9, 0.003, 1e-4),
    "middling model": Speed(0.008, 8e-4, 2e-8, 0.012, 3e-4),
    "large model": Speed(0.025, 2.5e-3, 5e-8, 0.03, 1e-3),
    "larger than the target allows": Speed(0.06, 8e-3, 2e-7, 0.09, 2e-3),
    "attention above all": Speed(0.001, 1e-4, 5e-8, 0.01, 1e-3),
}


def taught(speed: Speed) -> PrefillCostModel:
    """Return a cost model trained on decode steps of one row, then on chunks of its own choice."""
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=2048)
    for _ in range(20):
        pace.learn(speed.decode_s(1), decoded=True)
    for _ in range(10):
        run(pace, speed)
    return pace


def run(pace: PrefillCostModel, speed: Speed, *, factor: float = 1.0) -> int:
    """Run a step with a chunk of a long prompt; return the chunk's tokens."""
    size = pace.budget(decoding=True).chunk_length(10**6, 0)
    call = PrefillCall(size, 0)
    pace.learn(speed.decode_s(1) + factor * speed.prefill_s(call), decoded=True, calls=[call])
    return size


@pytest.mark.parametrize("name", SPEEDS)
def test_when_nobody_decodes_a_chunk_may_take_a_second(name: str) -> None:
    speed = SPEEDS[name]
    pace = taught(speed)
    size = pace.budget(decoding=False).chunk_length(10**6, 0)
    assert size >= pace.budget(decoding=True).chunk_length(10**6, 0)
    for _ in range(10):
        call = PrefillCall(pace.budget(decoding=False).chunk_length(10**6, 0), 0)
        pace.learn(speed.prefill_s(call), decoded=False, calls=[call])
    size = pace.budget(decoding=False).chunk_length(10**6, 0)
    assert speed.prefill_s(PrefillCall(size, 0)) <= IDLE_S
    assert size == 2048 or speed.prefill_s(PrefillCall(2 * size, 0)) > IDLE_S


@pytest.mark.parametrize("name", ["small model", "larger than the target allows"])
@pytest.mark.parametrize("factor", [100.0, 0.0])
def test_a_single_measurement_that_is_far_off_matters_little(name: str, factor: float) -> None:
    speed = SPEEDS[name]
    pace = taught(speed)
    before = run(pace, speed)
    run(pace, speed, factor=factor)
    after = [run(pace, speed) for _ in range(12)]
    assert max(CHUNK_TOKENS_MIN, before / 4) <= after[0] <= 2 * before
    assert before / 1.5 <= after[-1] <= 1.5 * before


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_machine_that_becomes_another_is_followed(factor: float) -> None:
    speed = SPEEDS["middling model"]
    pace = taught(speed)
    before = run(pace, speed)
    sizes = [run(pace, speed, factor=factor) for _ in range(15)]
    assert sizes[-1] == pytest.approx(before / factor, rel=0.5)


@pytest.mark.parametrize(
    ("decode_s", "prefill_s"),
    [
        (0.04, CALL_SHARE * 0.04),
        (0.2, 0.5 - 0.2),
        (0.3, 0.3),
        (2.0, 2.0),
    ],
)
def test_single_gap_is_bounded_unless_two_decode_steps_take_longer(decode_s: float, prefill_s: float) -> None:
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=2048, gap_s_max=0.5)
    for _ in range(40):
        pace.learn(decode_s, decoded=True)
    assert pace.budget(decoding=True).room_s == pytest.approx(prefill_s, rel=0.35)
    assert pace.budget(decoding=True).room_s <= 1.01 * prefill_s


times = st.floats(0, 1000, allow_nan=False)
seen = st.tuples(times, st.booleans(), st.integers(0, 5), st.integers(1, 5000))


@given(st.lists(seen, max_size=60), st.integers(1, 4096), st.integers(1, 10**6), st.booleans())
@settings(max_examples=100)
def test_whatever_was_measured_a_prompt_gets_on_and_no_bound_is_passed(
    history: list[tuple[float, bool, int, int]], tokens_max: int, left: int, decoding: bool
) -> None:
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=tokens_max)
    for seconds, decoded, calls, tokens in history:
        pace.learn(seconds, decoded=decoded, calls=[PrefillCall(tokens, tokens)] * calls)
    assert math.isfinite(pace.seconds([PrefillCall(3000, 1000)]))
    size = pace.budget(decoding=decoding).chunk_length(left, 1000)
    is_known = any(calls for _, _, calls, _ in history)
    assert 1 <= size <= min(left, tokens_max if is_known else CHUNK_TOKENS_FIRST)


@dataclass
class Streams:
    """Streams that decode forever while prompts arrive. Like the real one, the engine runs one step ahead."""

    speed: Speed
    seed: int
    spikes: float = 0.0
    streams: int = 8
    gaps: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    calm: list[bool] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    now: float = 0.0
    _read_at: float = 0.0
    _ahead_until: float | None = None
    _spiked: bool = False
    _prefilled: bool = False
    _cut: bool = False
    _smallest: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.scheduler = Scheduler(SchedulerConfig(rows_max=16, inter_token_target_s=TARGET_S))
        self.came = 0
        for _ in range(self.streams):
            self.come(10)

    def come(self, prompt: int) -> None:
        tokens = (self.came, *range(1, prompt))
        request = engine_request(f"r{self.came}", tokens, max_tokens=10**9)
        self.scheduler.add(request, self.now)
        self.came += 1

    def noise(self) -> float:
        if self.random.random() < self.spikes:
            self._spiked = True
            return self.random.uniform(5, 20)
        return self.random.lognormvariate(0, 0.05)

    def step(self) -> None:
        if decodes := self.scheduler.decodes:
            self.decode()
        else:
            self.scheduler.on_step_end(self.now, decoded=None)
        for group in self.scheduler.plan().groups:
            self.prefill(group)
        if not decodes:
            self.scheduler.on_step_end(self.now, decoded=False)
        for row in self.scheduler:
            if row.phase is Phase.DECODE and row.queue_key[1] >= self.streams:
                self.scheduler.drop(row.id)

    def decode(self) -> None:
        reads = self._ahead_until is not None
        self.now = max(self.now, self._ahead_until or 0.0)
        self.scheduler.on_step_end(self.now, decoded=True if reads else None)
        rows = self.scheduler.count(Phase.DECODE)
        if reads and self._prefilled:
            self.gaps.append(self.now - self._read_at)
            decode_s = self.speed.decode_s(rows)
            prefill_s = max(self._smallest, CALL_SHARE * decode_s)
            self.limits.append(max(TARGET_S, 1.2 * (decode_s + prefill_s)))
            self.calm.append(not self._spiked)
            if self._cut:
                self.busy.append(self.gaps[-1])
        if reads:
            for row in self.scheduler.decoding:
                self.scheduler.answered(row, 0)
        self._read_at, self._smallest = self.now, 0.0
        self._spiked = self._prefilled = self._cut = False
        self._ahead_until = self.now + self.speed.decode_s(rows) * self.noise()

    def prefill(self, group: Group) -> None:
        context = group[0].row.prefilled
        took = self.speed.prefill_s(call_of(group)) * self.noise()
        self.now = max(self.now, self._ahead_until or 0.0) + took
        least = PrefillCall(CHUNK_TOKENS_MIN, context)
        self._smallest = max(self._smallest, self.speed.prefill_s(least))
        self._prefilled, self._cut = True, self._cut or not group[0].last
        self.scheduler.ran(group)
        for chunk in group:
            if chunk.last:
                self.scheduler.started(chunk.row)

    def late(self) -> int:
        """Return the number of gaps that were too long although no disturbance occurred."""
        pairs = zip(self.gaps, self.limits, self.calm, strict=True)
        return sum(gap > limit for gap, limit, calm in pairs if calm)


@pytest.mark.parametrize(("spikes", "seed"), [(0.0, 0), (0.02, 1)])
@pytest.mark.parametrize("name", SPEEDS)
def test_running_streams_hardly_ever_wait_longer_than_the_target(name: str, spikes: float, seed: int) -> None:
    streams = Streams(SPEEDS[name], seed, spikes)
    while streams.now < 2 * BURST_S:  # what comes by then came with the streams
        streams.step()
    for _ in range(600):
        if streams.scheduler.count(Phase.WAITING, Phase.PREFILL) == 0 and streams.random.random() < 0.1:
            for _ in range(streams.random.choice((1, 1, 3))):
                streams.come(round(10 ** streams.random.uniform(0.5, 4.5)))
        streams.step()
    assert len(streams.gaps) > 50
    assert streams.late() <= max(1, 0.01 * len(streams.gaps))
    # Spare time is used: a step with a chunk of a long prompt takes most of the target.
    assert sum(streams.busy) / len(streams.busy) > TARGET_S / 2


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_all_but_a_few_steps_of_an_idle_machine_keep_to_the_target(spread: float) -> None:
    rng, speed = random.Random(spread), SPEEDS["middling model"]
    pace = taught(speed)
    late, spent = [], []
    for _ in range(1500):
        call = PrefillCall(pace.budget(decoding=True).chunk_length(10**6, 1000), 1000)
        seconds = (speed.decode_s(1) + speed.prefill_s(call)) * rng.lognormvariate(0, spread)
        pace.learn(seconds, decoded=True, calls=[call])
        late.append(seconds > TARGET_S)
        spent.append(seconds)
    assert sum(late[500:]) / len(late[500:]) <= 0.02
    # The time of a quiet machine is used too; not fully, because there are few sizes.
    assert sum(spent[500:]) / len(spent[500:]) > (0.7 if spread == 0.0 else 0.45) * TARGET_S


@pytest.mark.parametrize("name", SPEEDS)
def test_chunks_behind_a_long_stored_prefix_keep_to_the_target_from_the_first_on(name: str) -> None:
    speed, context = SPEEDS[name], 100_000
    pace = taught(speed)
    least_s = max(CALL_SHARE * speed.decode_s(1), speed.prefill_s(PrefillCall(CHUNK_TOKENS_MIN, context)))
    for _ in range(20):
        call = PrefillCall(pace.budget(decoding=True).chunk_length(10**6, context), context)
        seconds = speed.decode_s(1) + speed.prefill_s(call)
        assert seconds <= max(TARGET_S, 1.2 * (speed.decode_s(1) + least_s))
        pace.learn(seconds, decoded=True, calls=[call])
