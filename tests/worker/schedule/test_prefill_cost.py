"""Prefill budget of a step, against simulated engines with known speeds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories import engine_request
from worker.schedule.prefill_cost import (
    CALL_SHARE,
    CHUNK_TOKENS_FIRST,
    CHUNK_TOKENS_MIN,
    GROWTH_MAX,
    IDLE_S,
    LATE_SHARE,
    MARGIN_MAX,
    MARGIN_MIN,
    PAUSES_MAX,
    PREFILL_SHARE_MIN,
    PrefillCostModel,
    PrefillWork,
)
from worker.schedule.rows import Group, Phase, work_of
from worker.schedule.scheduler import Scheduler, SchedulerConfig

TARGET_S = 0.1


@dataclass(frozen=True)
class Speed:
    """Seconds per call, per token and per pair of a token and an earlier one; per decode step, and per row in
    it."""

    call: float
    token: float
    reach: float
    decode: float
    row: float

    def prefill_s(self, work: PrefillWork) -> float:
        return work.calls * self.call + work.tokens * self.token + work.reach * self.reach

    def decode_s(self, rows: int) -> float:
        return self.decode + self.row * rows if rows else 0.0


SPEEDS = {
    "small model": Speed(0.002, 2e-5, 2e-9, 0.003, 1e-4),
    "middling model": Speed(0.008, 8e-4, 2e-8, 0.012, 3e-4),
    "large model": Speed(0.025, 2.5e-3, 5e-8, 0.03, 1e-3),
    "larger than the target allows": Speed(0.06, 8e-3, 2e-7, 0.09, 2e-3),
    "attention above all": Speed(0.001, 1e-4, 5e-8, 0.01, 1e-3),
}


def taught(speed: Speed, *, tokens_max: int = 2048, contexts: Iterable[int] = (0,)) -> PrefillCostModel:
    """Return a cost model trained on decode steps of one row, then on chunks of its own choice at each
    context."""
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=tokens_max)
    for _ in range(20):
        pace.learn(speed.decode_s(1), decoded=True, work=PrefillWork())
    for context in contexts:
        for _ in range(10):
            run(pace, speed, context)
    return pace


def run(pace: PrefillCostModel, speed: Speed, context: int, *, factor: float = 1.0) -> int:
    """Run a step with a chunk of a long prompt; return the chunk's tokens."""
    size = pace.budget(decoding=True).chunk_length(10**6, context)
    work = PrefillWork.call(1, size, context)
    pace.learn(speed.decode_s(1) + factor * speed.prefill_s(work), decoded=True, work=work)
    return size


# --- planning ----------------------------------------------------------------------------------------


def test_sizes_that_were_never_tried_are_approached_in_steps() -> None:
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=2048)
    sizes = []
    for _ in range(5):
        sizes.append(pace.budget(decoding=False).chunk_length(10**6, 0))
        pace.learn(1e-6, decoded=False, work=PrefillWork.call(1, sizes[-1], 0))
    assert sizes == [64, 64 * GROWTH_MAX, 64 * GROWTH_MAX**2, 2048, 2048]


@pytest.mark.parametrize("name", SPEEDS)
def test_a_step_with_a_chunk_stays_within_the_target_or_the_chunk_is_as_small_as_it_gets(name: str) -> None:
    speed = SPEEDS[name]
    pace = taught(speed)
    size = run(pace, speed, 0)
    prefill_s = speed.prefill_s(PrefillWork.call(1, size, 0))
    within_target = speed.decode_s(1) + prefill_s <= TARGET_S
    within_share = prefill_s <= CALL_SHARE * speed.decode_s(1)
    assert within_target or within_share or size == CHUNK_TOKENS_MIN
    # The available time is used: the next size but one would be too large.
    larger = [other for other in pace.sizes if other > size][-2:]
    if len(larger) == 2:
        too_large = speed.decode_s(1) + speed.prefill_s(PrefillWork.call(1, larger[0], 0))
        assert too_large > TARGET_S / MARGIN_MAX


@pytest.mark.parametrize("name", SPEEDS)
def test_when_nobody_decodes_a_chunk_may_take_a_second(name: str) -> None:
    speed = SPEEDS[name]
    pace = taught(speed)
    size = pace.budget(decoding=False).chunk_length(10**6, 0)
    assert size >= pace.budget(decoding=True).chunk_length(10**6, 0)
    for _ in range(10):
        work = PrefillWork.call(1, pace.budget(decoding=False).chunk_length(10**6, 0), 0)
        pace.learn(speed.prefill_s(work), decoded=False, work=work)
    size = pace.budget(decoding=False).chunk_length(10**6, 0)
    assert speed.prefill_s(PrefillWork.call(1, size, 0)) <= IDLE_S
    assert size == 2048 or speed.prefill_s(PrefillWork.call(1, 2 * size, 0)) > IDLE_S


def test_chunks_become_smaller_as_the_context_grows_and_a_fresh_prompt_begins_with_large_ones() -> None:
    speed = SPEEDS["attention above all"]
    pace = taught(speed)
    fresh = run(pace, speed, 0)
    sizes = [run(pace, speed, context) for context in range(0, 100_000, 1000)]
    assert sizes[-1] < fresh / 4
    assert all(b <= 1.5 * a for a, b in itertools.pairwise(sizes))
    again = [run(pace, speed, 0) for _ in range(6)]
    assert again[-1] >= fresh / 2


def test_a_step_holds_several_calls_as_long_as_there_is_time_for_them() -> None:
    speed = SPEEDS["middling model"]
    budget = taught(speed).budget(decoding=True)
    calls = 0
    while size := budget.chunk_length(10, 0):
        assert size == 10
        budget.spend(PrefillWork.call(1, size, 0))
        calls += 1
    assert calls > 1
    assert not budget.holds(PrefillWork.call(1, 10, 0))
    took = speed.decode_s(1) + speed.prefill_s(budget.spent)
    assert TARGET_S / 3 < took <= TARGET_S


def test_only_the_first_call_of_a_step_is_cut() -> None:
    budget = taught(SPEEDS["middling model"]).budget(decoding=True)
    size = budget.chunk_length(5000, 0)
    assert size in PrefillCostModel(target_s=1, tokens_max=2048).sizes
    budget.spend(PrefillWork.call(1, size, 0))
    assert budget.chunk_length(5000, 0) == 0


# --- learning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPEEDS)
def test_prefill_is_priced_without_the_decode_step_beside_it(name: str) -> None:
    speed = SPEEDS[name]
    pace = taught(speed)
    work = PrefillWork.call(1, run(pace, speed, 0), 0)
    assert pace.seconds(work) == pytest.approx(speed.prefill_s(work), rel=0.1)


@pytest.mark.parametrize("name", SPEEDS)
@pytest.mark.parametrize("factor", [100.0, 0.0])
def test_a_single_measurement_that_is_far_off_matters_little(name: str, factor: float) -> None:
    speed = SPEEDS[name]
    pace = taught(speed)
    before = run(pace, speed, 0)
    run(pace, speed, 0, factor=factor)
    after = [run(pace, speed, 0) for _ in range(12)]
    assert max(CHUNK_TOKENS_MIN, before / 4) <= after[0] <= 2 * before
    assert before / 1.5 <= after[-1] <= 1.5 * before


def test_short_prompts_say_little_about_long_ones() -> None:
    speed = SPEEDS["middling model"]
    pace = taught(speed)
    before = run(pace, speed, 0)
    generator = random.Random(1)
    for _ in range(2000):
        work = PrefillWork.call(1, generator.randint(1, 8), 0)
        took = speed.prefill_s(work) * generator.lognormvariate(0, 0.2)
        pace.learn(took + speed.decode_s(1), decoded=True, work=work)
    assert before / 2 <= run(pace, speed, 0) <= 2 * before


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_machine_that_becomes_another_is_followed(factor: float) -> None:
    speed = SPEEDS["middling model"]
    pace = taught(speed)
    before = run(pace, speed, 0)
    sizes = [run(pace, speed, 0, factor=factor) for _ in range(15)]
    assert sizes[-1] == pytest.approx(before / factor, rel=0.5)


def test_decode_time_is_subtracted_from_the_prefill_budget() -> None:
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=2048)
    for seconds in (0.005, 0.01):
        for _ in range(20):
            pace.learn(seconds, decoded=True, work=PrefillWork())
        room_s = pace.budget(decoding=True).room_s
        assert TARGET_S / MARGIN_MAX - seconds <= room_s * 1.01
        assert room_s <= 1.01 * (TARGET_S / MARGIN_MIN - seconds)


def test_where_decoding_alone_takes_the_target_prompts_have_a_share_of_the_time() -> None:
    for decode_s in (TARGET_S, 4 * TARGET_S):
        pace = PrefillCostModel(target_s=TARGET_S, tokens_max=2048)
        for _ in range(40):
            pace.learn(decode_s, decoded=True, work=PrefillWork())
            work = PrefillWork.call(1, pace.budget(decoding=False).chunk_length(10**6, 0), 0)
            pace.learn(decode_s + 0.001 * work.tokens, decoded=True, work=work)
        size = pace.budget(decoding=True).chunk_length(10**6, 0)
        assert 0.4 * CALL_SHARE * decode_s <= 0.001 * size <= 1.1 * CALL_SHARE * decode_s


@pytest.mark.parametrize(
    ("decode_s", "prefill_s"),
    [
        (0.04, CALL_SHARE * 0.04),
        (0.2, 0.5 - 0.2),
        (0.3, PREFILL_SHARE_MIN * 0.3),
        (2.0, PREFILL_SHARE_MIN * 2.0),
    ],
)
def test_a_single_gap_is_bounded_unless_two_decode_steps_take_longer(
    decode_s: float, prefill_s: float
) -> None:
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=2048, gap_s_max=0.5)
    for _ in range(40):
        pace.learn(decode_s, decoded=True, work=PrefillWork())
    assert pace.budget(decoding=True).room_s == pytest.approx(prefill_s, rel=0.35)
    assert pace.budget(decoding=True).room_s <= 1.01 * prefill_s


def test_a_target_above_the_bound_of_a_gap_is_kept() -> None:
    pace = PrefillCostModel(target_s=2.0, tokens_max=2048, gap_s_max=0.5)
    pace.learn(0.1, decoded=True, work=PrefillWork())
    assert pace.budget(decoding=True).room_s > 1.0


def test_prefill_pauses_a_few_times_until_a_decode_step_is_measured() -> None:
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=2048)
    assert not pace.pauses_prefill()  # a first prompt runs at once
    pace.learn(0.1, decoded=False, work=PrefillWork.call(1, 64, 0))
    assert [pace.pauses_prefill() for _ in range(PAUSES_MAX + 1)] == [True] * PAUSES_MAX + [False]
    pace.learn(0.05, decoded=True, work=PrefillWork())
    assert not pace.pauses_prefill()
    assert pace.decode_s == 0.05


@pytest.mark.parametrize("factor", [2.0, 20.0])
def test_slow_decode_step_changes_the_estimate_by_a_quarter(factor: float) -> None:
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=2048)
    for seconds in (0.01, 0.01 * factor):
        pace.learn(seconds, decoded=True, work=PrefillWork())
    assert pace.decode_s == pytest.approx(0.0125)


times = st.floats(0, 1000, allow_nan=False)
seen = st.tuples(times, st.booleans(), st.integers(0, 5), st.integers(1, 5000))


@given(st.lists(seen, max_size=60), st.integers(1, 4096), st.integers(1, 10**6), st.booleans())
@settings(max_examples=100)
def test_whatever_was_measured_a_prompt_gets_on_and_no_bound_is_passed(
    history: list[tuple[float, bool, int, int]], tokens_max: int, left: int, decoding: bool
) -> None:
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=tokens_max)
    largest = 0
    for seconds, decoded, calls, tokens in history:
        work = PrefillWork(calls, tokens, tokens * calls, float(tokens * tokens * calls))
        pace.learn(seconds, decoded=decoded, work=work)
        largest = max(largest, tokens * calls)
    assert math.isfinite(pace.seconds(PrefillWork.call(3, 1000, 1000)))
    size = pace.budget(decoding=decoding).chunk_length(left, 1000)
    assert 1 <= size <= min(left, tokens_max, max(CHUNK_TOKENS_FIRST, GROWTH_MAX * largest))
    assert size in (left, CHUNK_TOKENS_MIN) or size in pace.sizes


# --- inter-token gaps --------------------------------------------------------------------------------


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
        self.scheduler.add(request, 0.0)
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
        took = self.speed.prefill_s(work_of(group)) * self.noise()
        self.now = max(self.now, self._ahead_until or 0.0) + took
        self._smallest = max(
            self._smallest, self.speed.prefill_s(PrefillWork.call(1, CHUNK_TOKENS_MIN, context))
        )
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
    for _ in range(600):
        if streams.scheduler.count(Phase.WAITING, Phase.PREFILL) == 0 and streams.random.random() < 0.1:
            for _ in range(streams.random.choice((1, 1, 3))):
                streams.come(round(10 ** streams.random.uniform(0.5, 4.5)))
        streams.step()
    assert len(streams.gaps) > 50
    assert streams.late() <= max(1, 0.01 * len(streams.gaps))
    # Spare time is used: a step with a chunk of a long prompt takes most of the target.
    assert sum(streams.busy) / len(streams.busy) > TARGET_S / 2


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.2])
def test_all_but_a_few_steps_keep_to_the_target_however_busy_the_machine(spread: float) -> None:
    rng, speed = random.Random(spread), SPEEDS["middling model"]
    pace = taught(speed)
    late, spent = [], []
    for _ in range(1500):
        work = PrefillWork.call(1, pace.budget(decoding=True).chunk_length(10**6, 1000), 1000)
        seconds = (speed.decode_s(1) + speed.prefill_s(work)) * rng.lognormvariate(0, spread)
        pace.learn(seconds, decoded=True, work=work)
        late.append(seconds > TARGET_S)
        spent.append(seconds)
    assert sum(late[500:]) / len(late[500:]) <= 2 * LATE_SHARE
    # The time of a quiet machine is used too; not fully, because there are few sizes.
    assert sum(spent[500:]) / len(spent[500:]) > (0.7 if spread == 0.0 else 0.45) * TARGET_S


# --- several rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("column", "token"), [(1e-3, 0.0), (4e-4, 3e-4), (0.0, 1e-3)])
def test_cost_of_further_rows_is_learned(column: float, token: float) -> None:
    rng = random.Random(1)
    pace = PrefillCostModel(target_s=TARGET_S, tokens_max=2048)
    for _ in range(60):
        work = PrefillWork.call(rng.choice((1, 1, 2, 4, 8)), rng.choice((32, 64, 128)), 0)
        took = 0.003 + column * work.width + token * work.tokens
        pace.learn(took * rng.lognormvariate(0, 0.05), decoded=False, work=work)
    for rows in (1, 4, 16):
        work = PrefillWork.call(rows, 64, 0)
        took = 0.003 + column * work.width + token * work.tokens
        assert pace.seconds(work) == pytest.approx(took, rel=0.35)
