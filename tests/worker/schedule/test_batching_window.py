"""Batching window and burst gate: how long an idle worker waits for more requests, and for their prompts."""

from __future__ import annotations

import pytest

from tests.factories import engine_request
from worker.contract.engine import CacheSpec
from worker.prefixes.index import PrefixIndex
from worker.schedule.batching_window import (
    BURST_S,
    GATHERED_ROW_S,
    GATHERED_S,
    GATHERED_S_MAX,
    WINDOW_ALONE_S,
    WINDOW_RESUMED_S,
    BatchingWindow,
)
from worker.schedule.rows import Phase
from worker.schedule.scheduler import Scheduler, SchedulerConfig

PROMPT = 100


def test_resumed_request_opens_a_longer_batching_window() -> None:
    window = BatchingWindow(0.005)
    window.arrived(10.0, resumed=True)
    assert window.open(10.0) == WINDOW_RESUMED_S
    window.arrived(20.0)
    assert window.open(20.0) == WINDOW_ALONE_S
    off = BatchingWindow(0.0)
    off.arrived(10.0, resumed=True)
    assert off.open(10.0) == 0.0


class Burst:
    """A scheduler with a stream of prompts. Each prompt token takes `token_s`; decoding takes no time."""

    def __init__(
        self, token_s: float, prefixes: PrefixIndex | None = None, gathered_s: float = GATHERED_S_MAX
    ) -> None:
        config = SchedulerConfig(rows_max=8, prefill_tokens=PROMPT, gathered_s=gathered_s)
        self.scheduler = Scheduler(config, prefixes)
        self.now, self.token_s = 0.0, token_s
        self.come("first")
        self.step(4)  # the cost of a prompt is measured by then
        self.scheduler.drop("first")

    def come(self, *ids: str, resume: tuple[int, ...] = ()) -> None:
        for id in ids:
            tokens = (hash(id), *range(PROMPT))
            self.scheduler.add(engine_request(id, tokens, max_tokens=99, resume=resume), self.now)

    def step(self, count: int = 1) -> None:
        """Run `count` steps: decode if the gate allows it, and execute the plan."""
        for _ in range(count):
            if decodes := self.scheduler.decodes:
                for row in self.scheduler.decoding:
                    self.scheduler.answered(row, 7)
            self.scheduler.on_step_end(self.now, decoded=None)
            for group in self.scheduler.plan().groups:
                self.now += self.token_s * sum(len(chunk.tokens) for chunk in group)
                self.scheduler.ran(group)
                for chunk in group:
                    if chunk.last:
                        self.scheduler.started(chunk.row)
            self.scheduler.on_step_end(self.now, decoded=None if decodes else False)

    def said(self) -> dict[str, int]:
        return {row.id: len(row.answered) for row in self.scheduler}

    def until_begun(self, id: str) -> None:
        """Step until the request has its first token."""
        while not self.said()[id]:
            self.step()


def test_the_first_of_a_burst_waits_for_the_last() -> None:
    burst = Burst(token_s=0.2 * GATHERED_S / PROMPT)
    burst.come("a", "b", "c")
    burst.until_begun("a")
    assert burst.said() == {"a": 1, "b": 1, "c": 1}


def test_no_burst_is_gathered_if_that_is_switched_off() -> None:
    burst = Burst(token_s=0.02 * GATHERED_S / PROMPT, gathered_s=0.0)
    burst.come("a", "b", "c")
    while not burst.scheduler.decoding:
        burst.step()
    assert burst.scheduler.awaited is None


@pytest.mark.parametrize(("steps", "together"), [(1, 1), (5, 0)])
def test_request_that_arrives_soon_after_the_first_belongs_to_its_burst(steps: int, together: int) -> None:
    burst = Burst(token_s=0.4 * BURST_S / PROMPT)
    burst.come(*"abcdefg")
    while not burst.scheduler.decoding:
        burst.step()
    burst.step(steps)
    burst.come("late")
    burst.until_begun("a")
    assert burst.said() == {**dict.fromkeys("abcdefg", 1), "late": together}


def test_of_a_burst_that_takes_too_long_the_first_prompts_are_gathered() -> None:
    burst = Burst(token_s=0.26 * GATHERED_ROW_S * 6 / PROMPT)
    burst.come(*"abcdef")
    burst.until_begun("a")
    assert burst.said() == {**dict.fromkeys("abcd", 1), "e": 0, "f": 0}


def test_row_with_output_is_not_delayed_by_a_burst() -> None:
    burst = Burst(token_s=0.2 * GATHERED_S / PROMPT)
    burst.come("a")
    burst.until_begun("a")
    burst.come("b", "c")
    for step in range(2, 5):
        burst.step()
        assert burst.said()["a"] == step


def test_resumed_row_is_not_delayed_by_a_burst() -> None:
    burst = Burst(token_s=0.2 * GATHERED_S / PROMPT)
    burst.come("a", resume=(7,))
    burst.come("b", "c")
    while not burst.scheduler.decoding:
        burst.step()
    assert burst.scheduler.decodes
    assert burst.scheduler.count(Phase.DECODE) < 3


def test_steady_arrivals_do_not_delay_decoding() -> None:
    burst = Burst(token_s=0.1 * GATHERED_S / PROMPT)
    burst.come("a", "b")
    began, number = burst.now, 0
    while not burst.scheduler.decodes:
        burst.come(f"later {(number := number + 1)}")
        burst.step()
    assert burst.now - began <= 0.9 * GATHERED_S  # not until the gate's bound


def test_burst_that_takes_longer_than_predicted_delays_its_first_row_for_a_bounded_time() -> None:
    burst = Burst(token_s=0.1 * GATHERED_S / PROMPT)
    burst.come(*"abcdefgh")
    while not burst.scheduler.decoding:
        burst.step()
    began, burst.token_s = burst.now, 6 * burst.token_s
    burst.until_begun("a")
    assert burst.now - began <= 1.3 * GATHERED_ROW_S * 8
    assert burst.said()["h"] == 0


@pytest.mark.parametrize(("stored", "together"), [(0, 0), (80, 1)])
def test_stored_prefixes_do_not_count_as_prompts_to_wait_for(stored: int, together: int) -> None:
    shared = tuple(range(PROMPT))
    index = PrefixIndex(CacheSpec())
    if stored:
        index.add(shared, 0, stored, "payload", 1)
    burst = Burst(token_s=1.1 * GATHERED_ROW_S * 3 / PROMPT, prefixes=index)
    for place, id in enumerate("abc"):
        tokens = (*shared[:80], *range(1000 * place, 1000 * place + 20))
        burst.scheduler.add(engine_request(id, tokens, max_tokens=99), burst.now)
    burst.until_begun("a")
    assert burst.said() == {"a": 1, "b": together, "c": together}


def test_short_prompt_that_overtook_a_long_one_does_not_wait_for_it() -> None:
    burst = Burst(token_s=0.05 * GATHERED_S / PROMPT)
    burst.scheduler.add(engine_request("long", tuple(range(9 * PROMPT)), max_tokens=9), burst.now)
    burst.step(2)
    burst.come("short")
    began = burst.now
    burst.until_begun("short")
    assert burst.now - began <= 0.2 * GATHERED_S
    long = burst.scheduler.get("long")
    assert long is not None
    assert long.left > 5 * PROMPT
