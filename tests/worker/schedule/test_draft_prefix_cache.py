"""A draft model does not recompute an earlier turn's tokens, and its prefix cache stays within its limit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from protocol.prefix_namespace import salt_in
from tests.worker.schedule.test_draft_proposals import TARGET_S, Guesser, House
from tests.worker.schedule.test_speculation import row_of
from worker.contract.engine import CacheSegment, CacheSlice, CacheSpec
from worker.schedule.draft_prefix_cache import KEPT_TOKENS_MIN, DraftPrefixCache, open_draft_prefix_cache
from worker.schedule.draft_proposals import DraftCatchUp
from worker.schedule.rows import Row
from worker.schedule.speculation import Speculation

ADDED = 40
"""Tokens that a turn adds to the conversation, besides the answer."""
TURNS = 10
TOKEN_BYTES = 10


@dataclass
class Notebook(Guesser):
    """A draft network whose rows can be stored and restored."""

    shape: CacheSpec | None = field(default_factory=CacheSpec)
    is_torn: bool = False

    def copy_cache(
        self, row: str, runs: Sequence[tuple[int, int]], *, states: bool
    ) -> tuple[list[CacheSlice], CacheSlice | None]:
        if self.is_torn:
            raise RuntimeError("torn")
        assert all(last <= self.length(row) for _, last in runs)
        cuts = [CacheSlice((first, last), TOKEN_BYTES * (last - first)) for first, last in runs]
        return cuts, CacheSlice(self.length(row), TOKEN_BYTES) if states else None

    def restore(self, row: str, pieces: Sequence[CacheSegment], states: object | None) -> None:
        if self.is_torn:
            raise RuntimeError("torn")
        length = pieces[-1].first + pieces[-1].count
        assert self.shape is not None
        assert states == (length if self.shape.has_states else None)
        self._lengths[row] = length

    def row_bytes(self, tokens: int) -> int:
        return TOKEN_BYTES * tokens


class Agent:
    """A conversation, each prompt of which begins with the previous prompt and its answer."""

    def __init__(self, shape: CacheSpec, *, recalls: bool = True) -> None:
        self.notebook = Notebook({}, 0.9, shape=shape)
        self.draft_prefix_cache = DraftPrefixCache(self.notebook, shape, 0.5)
        self.house = House(self.notebook)
        following = DraftCatchUp(self.notebook, TARGET_S, self.draft_prefix_cache if recalls else None)
        self.house.drafting = Speculation(following=following)
        self.dice = random.Random(7)
        self.said: tuple[int, ...] = self.tokens(300)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.dice.randrange(1000, 10**6) for _ in range(count))

    def turn(self, number: int, *, salt: str = "") -> int:
        """Run a turn. Return the number of tokens that the draft model read, between steps."""
        before = len(self.notebook.reads)
        row = self.begin(number, salt)
        self.notebook.answers = {row.id: list(self.tokens(200))}
        self.notebook.prompt = len(row.request.tokens)
        self.house.play([row], self.draft_prefix_cache.keep)
        self.said = (*row.request.tokens, *row.answered, *self.tokens(ADDED))
        return sum(self.notebook.reads[before:])

    def begin(self, number: int, salt: str) -> Row:
        row = row_of(str(number), self.said)
        row.request = replace(row.request, salt=salt, boundaries=(len(self.said) - 10,))
        return row


@pytest.mark.parametrize("shape", [CacheSpec(), CacheSpec(has_states=True)])
def test_a_turn_reads_what_is_new(shape: CacheSpec) -> None:
    agent, forgetful = Agent(shape), Agent(shape, recalls=False)
    read = [agent.turn(number) for number in range(TURNS)]
    again = [forgetful.turn(number) for number in range(TURNS)]
    assert read[0] == pytest.approx(300, abs=10)
    assert max(read[1:]) < 2 * ADDED
    assert again[-1] > 300 + 9 * 200


def test_evicted_draft_prefix_is_read_again() -> None:
    agent = Agent(CacheSpec())
    agent.turn(0)
    assert agent.draft_prefix_cache.nbytes > 300 * TOKEN_BYTES
    agent.draft_prefix_cache.fit(KEPT_TOKENS_MIN)
    assert agent.draft_prefix_cache.nbytes <= KEPT_TOKENS_MIN
    assert agent.turn(1) > 300
    assert agent.draft_prefix_cache.clear() > 300 * TOKEN_BYTES
    assert agent.draft_prefix_cache.nbytes == 0


def test_clear_of_a_namespace_leaves_the_draft_prefixes_of_others() -> None:
    agent = Agent(CacheSpec())
    for turn, namespace in enumerate(("ann", "bob")):
        agent.turn(turn, salt=salt_in(namespace, ""))
    assert agent.draft_prefix_cache.clear("ann") > 300 * TOKEN_BYTES
    assert agent.turn(2, salt=salt_in("bob", "")) < 2 * ADDED
    assert agent.turn(3, salt=salt_in("ann", "")) > 300


def test_draft_prefix_that_cannot_be_stored_or_restored_is_read_again() -> None:
    agent = Agent(CacheSpec())
    agent.turn(0)
    agent.notebook.is_torn = True
    assert agent.turn(1) > 300
    assert agent.turn(2) > 300


def test_only_what_can_be_made_again_is_kept() -> None:
    assert open_draft_prefix_cache(None, 1) is None
    assert open_draft_prefix_cache(Guesser({}, 0.5), 1) is None
    assert open_draft_prefix_cache(Notebook({}, 0.5, shape=None), 1) is None
    draft_prefix_cache = open_draft_prefix_cache(Notebook({}, 0.5), 4 * 1024 * TOKEN_BYTES)
    assert draft_prefix_cache is not None
    assert draft_prefix_cache.memory_share == pytest.approx(0.25)
