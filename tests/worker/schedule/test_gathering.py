"""Who comes together begins together, if that is a matter of a moment."""

from __future__ import annotations

from worker.contract import Draw, Prepared
from worker.schedule.gathering import GATHERED_S
from worker.schedule.rows import Phase
from worker.schedule.scheduler import Policy, Scheduler

PROMPT = 100


class Burst:
    """A scheduler that prompts come to; a token of them takes so long, and decoding takes nothing."""

    def __init__(self, token_s: float) -> None:
        self.scheduler = Scheduler(Policy(rows_max=8, prefill_tokens=PROMPT))
        self.now, self._token_s = 0.0, token_s
        self.come("first")
        self.step(4)  # what prompts take is known by then
        self.scheduler.drop("first")

    def come(self, *ids: str, resume: tuple[int, ...] = ()) -> None:
        for id in ids:
            tokens = (hash(id), *range(PROMPT))
            self.scheduler.add(Prepared(id, tokens, Draw(), (), 99, frozenset(), resume=resume), self.now)

    def step(self, count: int = 1) -> None:
        """Decodes if that is to be, and runs what is planned."""
        for _ in range(count):
            if decodes := self.scheduler.decodes:
                for row in self.scheduler.decoding:
                    self.scheduler.answered(row, 7)
            self.scheduler.lap(self.now, decoded=None)
            for group in self.scheduler.plan().groups:
                self.now += self._token_s * sum(len(chunk.tokens) for chunk in group)
                self.scheduler.ran(group)
                for chunk in group:
                    if chunk.last:
                        self.scheduler.started(chunk.row)
            self.scheduler.lap(self.now, decoded=None if decodes else False)

    def said(self) -> dict[str, int]:
        return {row.id: len(row.answered) for row in self.scheduler}

    def until_begun(self, id: str) -> None:
        """It has said something."""
        while not self.said()[id]:
            self.step()


def test_the_first_of_a_burst_waits_for_the_last() -> None:
    burst = Burst(token_s=0.2 * GATHERED_S / PROMPT)
    burst.come("a", "b", "c")
    burst.until_begun("a")
    assert burst.said() == {"a": 1, "b": 1, "c": 1}


def test_nobody_waits_for_prompts_that_take_long() -> None:
    burst = Burst(token_s=0.6 * GATHERED_S / PROMPT)
    burst.come("a", "b", "c")
    burst.until_begun("a")
    assert burst.said() == {"a": 1, "b": 0, "c": 0}


def test_whoever_has_said_something_waits_for_nobody() -> None:
    burst = Burst(token_s=0.2 * GATHERED_S / PROMPT)
    burst.come("a")
    burst.until_begun("a")
    burst.come("b", "c")
    for step in range(2, 5):
        burst.step()
        assert burst.said()["a"] == step


def test_who_goes_on_with_an_answer_waits_for_nobody() -> None:
    burst = Burst(token_s=0.2 * GATHERED_S / PROMPT)
    burst.come("a", resume=(7,))
    burst.come("b", "c")
    while not burst.scheduler.decoding:
        burst.step()
    assert burst.scheduler.decodes
    assert burst.scheduler.count(Phase.DECODE) < 3


def test_those_who_keep_coming_hold_nobody_up_for_long() -> None:
    burst = Burst(token_s=0.2 * GATHERED_S / PROMPT)
    burst.come("a", "b")
    began, number = burst.now, 0
    while not burst.said()["a"]:
        burst.come(f"later {(number := number + 1)}")
        burst.step()
    assert burst.now - began <= 1.5 * GATHERED_S
