"""A draft network is asked, and catches up, where its drafts pay: simulated times."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.worker.core.test_speculation import row_of, verified
from worker.core.drafts import MODEL, SOURCES
from worker.core.rows import Row
from worker.core.speculation import Speculation
from worker.values import BACKLOG_MAX, StepOutput

STEP_S = 0.01
TARGET_S = 0.1


@dataclass
class Guesser:
    """A draft network whose tokens are right with probability `skill`. Records its simulated seconds."""

    answers: Mapping[str, Sequence[int]]
    skill: float
    pass_s: float = 0.1 * STEP_S
    token_s: float = 0.01 * STEP_S
    relative_cost: float = 0.1
    prompt: int = 0
    spent_s: float = 0.0
    reads: list[int] = field(default_factory=list)
    drafts: int = 0
    longest: int = 0
    fails: bool = False
    _lengths: dict[str, int] = field(default_factory=dict)
    _dice: random.Random = field(default_factory=lambda: random.Random(8))

    def knows(self, row: str) -> bool:
        return True

    def length(self, row: str) -> int:
        return self._lengths.get(row, 0)

    def read(self, row: str, tokens: Sequence[int]) -> None:
        self._lengths[row] = self.length(row) + len(tokens)
        self.reads.append(len(tokens))
        self.spent_s += self.token_s * len(tokens)

    def draft(self, new_tokens: Mapping[str, Sequence[int]], count: int) -> Mapping[str, Sequence[int]]:
        if self.fails:
            raise RuntimeError("broken")
        assert all(0 < len(tokens) <= BACKLOG_MAX for tokens in new_tokens.values())
        self.drafts += 1
        self.spent_s += self.pass_s * count
        self.longest = max(self.longest, count)
        return {row: self._guesses(row, len(tokens), count) for row, tokens in new_tokens.items()}

    def _guesses(self, row: str, new_tokens: int, count: int) -> list[int]:
        self._lengths[row] = self.length(row) + new_tokens
        right = self.answers[row][self._lengths[row] - self.prompt :][:count]
        right = [*right, *[-1] * (count - len(right))]
        return [token if self._dice.random() < self.skill else -1 for token in right]

    def drop(self, row: str) -> None:
        self._lengths.pop(row, None)

    def reset(self) -> None:
        self._lengths.clear()

    def cache_bytes(self) -> int:
        return 0

    def row_bytes(self, tokens: int) -> int:
        return 0


@dataclass
class House:
    """Rows with scripted answers and a draft network. Each verify column adds `column_s` to a step."""

    guesser: Guesser
    column_s: float = 0.1 * STEP_S
    now: float = 0.0
    longest_s: float = 0.0
    drafting: Speculation = field(init=False)

    def __post_init__(self) -> None:
        self.drafting = Speculation(
            drafter=self.guesser, target_s=TARGET_S, position_cost=self.column_s / STEP_S
        )

    def play(self, rows: Sequence[Row]) -> float:
        """Run all rows to their ends and drop them. Return the time relative to plain decoding."""
        answers, began = self.guesser.answers, self.now
        while going := [row for row in rows if len(row.answered) < len(answers[row.id])]:
            before = self.guesser.spent_s
            drafts = self.drafting.propose(going)
            width = 1 + max(map(len, drafts.values()), default=0)
            took = STEP_S + self.column_s * (width - 1) + self.guesser.spent_s - before
            self.now, self.longest_s = self.now + took, max(self.longest_s, took)
            self.drafting.learn(verified(going, drafts, answers), self.now)
        for row in rows:
            self.guesser.drop(row.id)
        return (self.now - began) / (STEP_S * max(len(answers[row.id]) for row in rows))


def house(skill: float, rows: int = 1, tokens: int = 300, prompt: int = 50, **costs: Any) -> House:
    dice = random.Random(rows)
    answers = {str(row): [dice.randrange(1000, 10**6) for _ in range(tokens)] for row in range(rows)}
    return House(Guesser(answers, skill, prompt=prompt, **costs))


def rows_of(house: House, prompt: int = 50) -> list[Row]:
    return [row_of(id, range(prompt)) for id in house.guesser.answers]


@pytest.mark.parametrize("rows", [1, 8])
def test_good_guesses_take_far_fewer_steps(rows: int) -> None:
    played = house(0.9, rows)
    assert played.play(rows_of(played)) < 0.6
    status = played.drafting.status()
    assert status is not None
    assert status.sources["model"].accepted > 100 * rows
    assert status.accepted == status.sources["model"].accepted


@pytest.mark.parametrize("rows", [1, 8])
def test_bad_guesses_end_by_themselves(rows: int) -> None:
    played = house(0.1, rows, tokens=1000)
    for _ in range(3):
        assert played.play(rows_of(played)) < 1.03


def test_draft_network_that_is_never_right_is_rarely_tried() -> None:
    played = house(0.0, tokens=128)
    took = [played.play(rows_of(played)) for _ in range(100)]
    assert max(took) < 1.06
    assert sum(took) < 102


def test_draft_network_is_tried_again_after_a_while() -> None:
    played = house(0.0, tokens=1000)
    played.play(rows_of(played))
    played.guesser.skill = 0.9
    played.play(rows_of(played))
    assert played.play(rows_of(played)) < 0.6


def test_draft_network_that_costs_more_than_it_gains_is_not_asked() -> None:
    played = house(0.9, tokens=1000, relative_cost=1.0)
    assert played.play(rows_of(played)) == pytest.approx(1.0)
    assert not played.guesser.drafts


def test_a_prompt_is_read_in_chunks_that_streams_do_not_feel() -> None:
    played = house(0.9, tokens=1000, prompt=6000)
    assert played.play(rows_of(played, 6000)) < 0.75
    assert len(played.guesser.reads) > 10
    assert played.longest_s < TARGET_S


def test_a_prompt_is_not_read_for_a_short_answer() -> None:
    played = house(0.9, tokens=30, prompt=20_000)
    played.play(rows_of(played, 20_000))
    assert sum(played.guesser.reads) < 500


def test_prompts_of_others_go_first() -> None:
    played = house(0.9, prompt=1000)
    (row,) = rows_of(played, 1000)
    for on_step_end in range(20):
        played.drafting.interrupt()
        played.drafting.propose([row])
        played.drafting.learn(StepOutput({}, {}), on_step_end * STEP_S)
    assert played.guesser.reads == []


def test_failed_draft_network_is_not_asked_again() -> None:
    played = house(0.9)
    played.guesser.fails = True
    assert played.play(rows_of(played)) < 1.05
    assert played.drafting.propose(rows_of(played)) == {}


def test_no_more_is_guessed_than_there_is_room_for() -> None:
    played = house(1.0, rows=2)
    free, bound = rows_of(played)
    bound.reserved_length = bound.length + 3
    for row in (free, bound):
        played.guesser.read(row.id, row.tokens[:-1])
    drafts = played.drafting.propose([free, bound])
    assert len(drafts[bound.id]) == 2
    assert len(drafts[free.id]) == SOURCES[MODEL].length


def test_rows_with_images_or_without_leave_are_not_guessed_for() -> None:
    played = house(1.0, rows=2)
    for row in rows_of(played):
        answered = Speculation(drafter=played.guesser)
        without = row_of(row.id, range(50), speculation=False)
        for on_step_end in range(30):
            assert answered.propose([without]) == {}
            answered.learn(StepOutput({}, {}), on_step_end * STEP_S)
    assert played.guesser.drafts == 0
