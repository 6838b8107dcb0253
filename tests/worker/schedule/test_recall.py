"""What a draft model has read of an earlier turn is not read again, and takes no more memory than it may."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from tests.worker.schedule.test_drafting import row_of
from tests.worker.schedule.test_following import TARGET_S, Guesser, House
from worker.contract import Cut, Piece, Shape
from worker.schedule.drafting import Drafting
from worker.schedule.following import Following
from worker.schedule.recall import KEPT_TOKENS_MIN, Recall, open_recall
from worker.schedule.rows import Row

ADDED = 40
"""Tokens that a turn adds to the conversation, beside the answer."""
TURNS = 10
TOKEN_BYTES = 10


@dataclass
class Notebook(Guesser):
    """A guesser whose rows can be made again."""

    shape: Shape | None = field(default_factory=Shape)
    is_torn: bool = False

    def cut(self, row: str, runs: Sequence[tuple[int, int]], *, states: bool) -> tuple[list[Cut], Cut | None]:
        if self.is_torn:
            raise RuntimeError("torn")
        assert all(last <= self.length(row) for _, last in runs)
        cuts = [Cut((first, last), TOKEN_BYTES * (last - first)) for first, last in runs]
        return cuts, Cut(self.length(row), TOKEN_BYTES) if states else None

    def restore(self, row: str, pieces: Sequence[Piece], states: object | None) -> None:
        if self.is_torn:
            raise RuntimeError("torn")
        length = pieces[-1].first + pieces[-1].count
        assert self.shape is not None
        assert states == (length if self.shape.has_states else None)
        self._lengths[row] = length

    def row_bytes(self, tokens: int) -> int:
        return TOKEN_BYTES * tokens


class Agent:
    """One conversation, each prompt of which begins with the last and its answer."""

    def __init__(self, shape: Shape, *, recalls: bool = True) -> None:
        self.notebook = Notebook({}, 0.9, shape=shape)
        self.recall = Recall(self.notebook, shape, 0.5)
        self.house = House(self.notebook)
        following = Following(self.notebook, TARGET_S, self.recall if recalls else None)
        self.house.drafting = Drafting(following=following)
        self.dice = random.Random(7)
        self.said: tuple[int, ...] = self.tokens(300)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.dice.randrange(1000, 10**6) for _ in range(count))

    def turn(self, number: int, *, salt: str = "") -> int:
        """How many tokens were read in it, between steps."""
        before = len(self.notebook.reads)
        row = self.begin(number, salt)
        self.notebook.answers = {row.id: list(self.tokens(200))}
        self.notebook.prompt = len(row.request.tokens)
        self.house.play([row], self.recall.keep)
        self.said = (*row.request.tokens, *row.answered, *self.tokens(ADDED))
        return sum(self.notebook.reads[before:])

    def begin(self, number: int, salt: str) -> Row:
        row = row_of(str(number), self.said)
        row.request = replace(row.request, salt=salt, boundaries=(len(self.said) - 10,))
        return row


@pytest.mark.parametrize("shape", [Shape(), Shape(has_states=True)])
def test_a_turn_reads_what_is_new(shape: Shape) -> None:
    agent, forgetful = Agent(shape), Agent(shape, recalls=False)
    read = [agent.turn(number) for number in range(TURNS)]
    again = [forgetful.turn(number) for number in range(TURNS)]
    assert read[0] == pytest.approx(300, abs=10)
    assert max(read[1:]) < 2 * ADDED
    assert again[-1] > 300 + 9 * 200


def test_states_are_kept_where_later_prompts_are_alike() -> None:
    agent = Agent(Shape(has_states=True))
    prompt = agent.said
    agent.turn(0)
    agent.said = (*prompt[:290], *agent.tokens(100))
    assert agent.turn(1) < 120


def test_who_shares_nothing_reads_it_all() -> None:
    agent = Agent(Shape())
    agent.turn(0, salt="one")
    assert agent.turn(1, salt="other") > 300
    assert agent.turn(2, salt="other") < 2 * ADDED


def test_what_is_forgotten_is_read_again() -> None:
    agent = Agent(Shape())
    agent.turn(0)
    assert agent.recall.nbytes > 300 * TOKEN_BYTES
    agent.recall.fit(KEPT_TOKENS_MIN)
    assert agent.recall.nbytes <= KEPT_TOKENS_MIN
    assert agent.turn(1) > 300
    assert agent.recall.clear() > 300 * TOKEN_BYTES
    assert agent.recall.nbytes == 0


def test_what_cannot_be_kept_or_restored_is_read() -> None:
    agent = Agent(Shape())
    agent.turn(0)
    agent.notebook.is_torn = True
    assert agent.turn(1) > 300
    assert agent.turn(2) > 300


def test_only_what_can_be_made_again_is_kept() -> None:
    assert open_recall(None, 1) is None
    assert open_recall(Guesser({}, 0.5), 1) is None
    assert open_recall(Notebook({}, 0.5, shape=None), 1) is None
    recall = open_recall(Notebook({}, 0.5), 4 * 1024 * TOKEN_BYTES)
    assert recall is not None
    assert recall.share == pytest.approx(0.25)
