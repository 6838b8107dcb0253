"""Batching window and bursts: how long an idle worker waits for more requests, and how those start that came
together."""

from __future__ import annotations

import pytest

from protocol.types import BATCH_PRIORITY
from tests.factories import engine_request
from worker.core.batching_window import WINDOW_ALONE_S, WINDOW_RESUMED_S, BatchingWindow
from worker.core.prefix.index import PrefixIndex
from worker.core.scheduler import BURST_PROMPT_S_MAX, BURST_S, Scheduler, SchedulerConfig
from worker.values import CacheSpec

PROMPT = 100
PROMPT_S = 0.4
"""Seconds that a prompt of `PROMPT` tokens takes."""
DECODE_S = 0.02
GAP_S_MAX = 1.0


def test_resumed_request_opens_a_longer_batching_window() -> None:
    window = BatchingWindow(0.005)
    window.arrived(10.0, resumed=True)
    assert window.open(10.0) == WINDOW_RESUMED_S
    window.arrived(20.0)
    assert window.open(20.0) == WINDOW_ALONE_S
    off = BatchingWindow(0.0)
    off.arrived(10.0, resumed=True)
    assert off.open(10.0) == 0.0


@pytest.mark.parametrize(
    ("late_s", "idle", "together"),
    [(0.5 * BURST_S, True, True), (1.5 * BURST_S, True, False), (1.5 * BURST_S, False, True)],
)
def test_requests_that_come_soon_after_the_first_step_belong_to_its_burst(
    late_s: float, idle: bool, together: bool
) -> None:
    scheduler = Scheduler(SchedulerConfig(rows_max=8))
    first = scheduler.add(engine_request("a", PROMPT), 10.0)
    scheduler.on_step_end(11.0, decoded=False)
    if idle:
        scheduler.drop("a")
    second = scheduler.add(engine_request("b", PROMPT), 11.0 + late_s)
    assert (second.burst == first.burst) == together


class Burst:
    """A scheduler with a stream of prompts, whose costs are measured."""

    def __init__(self, prefixes: PrefixIndex | None = None) -> None:
        config = SchedulerConfig(rows_max=8, inter_token_target_s=0.1, inter_token_s_max=GAP_S_MAX)
        self.scheduler = Scheduler(config, prefixes)
        self.now = 0.0
        self.gaps: dict[str, list[float]] = {}
        """Seconds between the tokens of each row, from its first one on."""
        self._last: dict[str, float] = {}
        for id in ("first", "second"):
            self.come(id)
            self.step(8)
            self.scheduler.drop(id)
        self.now += 10.0
        self.step()

    def come(self, *ids: str, tokens: int = PROMPT, priority: int = 0, resume: tuple[int, ...] = ()) -> None:
        for id in ids:
            prompt = (*id.encode(), *range(tokens - len(id)))
            asked = engine_request(id, prompt, max_tokens=99, resume=resume, priority=priority)
            self.scheduler.add(asked, self.now)

    def step(self, count: int = 1) -> None:
        """Run `count` steps: decode, then execute the plan."""
        for _ in range(count):
            if decodes := self.scheduler.decodes:
                self.now += DECODE_S
                for row in self.scheduler.decoding:
                    self._emit(row.id)
            self.scheduler.on_step_end(self.now, decoded=True if decodes else None)
            for group in self.scheduler.plan().groups:
                self.now += PROMPT_S / PROMPT * sum(len(chunk.tokens) for chunk in group)
                self.scheduler.ran(group)
                for chunk in group:
                    if chunk.last:
                        self.scheduler.started(chunk.row, sampled=1)
                        self._emit(chunk.row.id)
            if not decodes:
                self.scheduler.on_step_end(self.now, decoded=False)

    def _emit(self, id: str) -> None:
        row = self.scheduler.get(id)
        assert row is not None
        self.scheduler.answered(row, 7)
        if id in self._last:
            self.gaps.setdefault(id, []).append(self.now - self._last[id])
        self._last[id] = self.now

    def until_started(self, *ids: str) -> None:
        """Step until these requests have their first tokens."""
        while not self._last.keys() >= {*ids}:
            self.step()


def test_those_that_came_together_decode_seldom_until_all_have_started() -> None:
    burst = Burst()
    burst.come(*"abcdefgh")
    burst.until_started(*"abcdefgh")
    gaps = burst.gaps["a"]
    assert max(gaps) <= GAP_S_MAX
    assert len(gaps) <= 5  # instead of one behind each quarter of a prompt
    burst.step(3)
    assert burst.gaps["a"][-1] == pytest.approx(DECODE_S)


def test_a_stream_keeps_its_pace_beside_those_that_come_later() -> None:
    burst = Burst()
    burst.come("a")
    burst.until_started("a")
    burst.now += 2 * BURST_S
    burst.step(2)  # an arrival counts as that of the start of the step before
    burst.come(*"bcd")
    burst.gaps.clear()
    burst.until_started(*"bcd")
    assert max(burst.gaps["a"]) <= 0.15


def test_a_long_prompt_is_not_waited_for_by_what_came_with_it() -> None:
    burst = Burst()
    burst.come("long", tokens=round(2 * BURST_PROMPT_S_MAX / PROMPT_S) * PROMPT)
    burst.come("short")
    burst.until_started("short")
    burst.step(20)
    assert max(burst.gaps["short"]) <= 0.15


def test_stored_prefixes_do_not_count_as_prompts_to_wait_for() -> None:
    shared = (7, *range(round(BURST_PROMPT_S_MAX / PROMPT_S) * PROMPT))
    index = PrefixIndex(CacheSpec())
    index.add(shared, 0, len(shared), "payload", 1)
    burst = Burst(index)
    burst.come("a")
    own = (*shared, *range(PROMPT))
    burst.scheduler.add(engine_request("b", own, max_tokens=99), burst.now)
    burst.until_started("a", "b")
    assert len(burst.gaps.get("a", [])) <= 1


def test_no_interactive_stream_waits_for_lines_of_batches() -> None:
    burst = Burst()
    burst.come("a")
    burst.come("b", "c", priority=BATCH_PRIORITY)
    burst.until_started("b", "c")
    assert max(burst.gaps["a"]) <= 0.15


def test_lines_of_batches_wait_for_interactive_prompts() -> None:
    burst = Burst()
    burst.come("line", priority=BATCH_PRIORITY)
    burst.until_started("line")
    burst.now += 2 * BURST_S
    burst.step(2)  # an arrival counts as that of the start of the step before
    burst.come("a")
    burst.gaps.clear()
    burst.until_started("a")
    assert len(burst.gaps.get("line", [])) <= 1


def test_lines_of_batches_do_not_keep_interactive_requests_from_starting_together() -> None:
    burst = Burst()
    burst.come("line", priority=BATCH_PRIORITY)
    burst.until_started("line")
    burst.now += 2 * BURST_S
    burst.step(2)  # an arrival counts as that of the start of the step before
    burst.come(*"abcdefg")
    burst.gaps.clear()
    burst.until_started(*"abcdefg")
    assert len(burst.gaps["a"]) <= 4  # instead of twenty


def test_streams_of_a_lost_worker_come_together() -> None:
    burst = Burst()
    burst.come(*"abcd", resume=(7, 8))
    burst.until_started(*"abcd")
    assert max(burst.gaps["a"]) <= GAP_S_MAX
    assert len(burst.gaps["a"]) <= 3
