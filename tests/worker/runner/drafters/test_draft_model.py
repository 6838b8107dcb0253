"""A draft model proposes for each row what it would generate alone after the same tokens."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.worker.probed_networks import network
from worker.runner.drafters.draft_model import DraftModelProposer
from worker.values import BACKLOG_MAX

VOCABULARY = 2000
"""Vocabulary size that all tiny models have at least; they also generate a few larger ids."""
KNOWN = 10**9


def alone(model: nn.Module, tokens: list[int], count: int) -> list[int]:
    """Return the network's own greedy continuation."""
    caches = make_prompt_cache(model)
    said: list[int] = []
    while len(said) < count:
        fed = mx.array([said[-1:] or tokens], mx.uint32)
        said.append(int(np.array(mx.argmax(model(fed, cache=caches)[0, -1]))))
    return said


class Lives:
    """Rows that join, catch up, get drafts, accept or reject them, and leave."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model = model
        self.followers = DraftModelProposer(model, 0.1, KNOWN)
        self.rows: dict[str, list[int]] = {}
        self.dice = random.Random(seed)
        self.guesses = 0

    def play(self, steps: int) -> None:
        for step in range(steps):
            if not step or (len(self.rows) < 4 and self.dice.random() < 0.4):
                length = self.dice.choice((1, 5, 40, 80)) if step else 250  # and outgrows its buffers
                self.rows[f"row {step}"] = [self.dice.randrange(VOCABULARY) for _ in range(length)]
            self.read()
            self.draft()
            for row in [*self.rows]:
                if self.dice.random() < 0.05:
                    self.followers.drop(row)
                    del self.rows[row]
        for row in self.rows:
            self.followers.drop(row)
        assert self.followers.cache_bytes() == 0

    def late(self, row: str) -> list[int]:
        return self.rows[row][self.followers.length(row) :]

    def read(self) -> None:
        for row in self.rows:
            if len(self.late(row)) > BACKLOG_MAX or (len(self.late(row)) > 1 and self.dice.random() < 0.1):
                self.followers.read(row, self.late(row)[: self.dice.randint(1, 100)])

    def draft(self) -> None:
        asked = {row: self.late(row) for row in self.rows if 0 < len(self.late(row)) <= BACKLOG_MAX}
        asked = {row: new_tokens for row, new_tokens in asked.items() if self.dice.random() < 0.8}
        if not asked:
            return
        count = self.dice.randint(1, 8)
        drafts = self.followers.draft(asked, count)
        assert drafts.keys() == asked.keys()
        for row, draft in drafts.items():
            self.guesses += 1
            assert list(draft) == alone(self.model, self.rows[row], count)
            right = self.dice.randint(0, count)
            self.rows[row] += [*draft[:right], self.dice.randrange(VOCABULARY)][: self.dice.randint(1, 9)]


@pytest.mark.parametrize("architecture", ["hybrid", "sliding", "deepseek_v3"])
def test_guesses_are_what_the_model_says_alone(architecture: str) -> None:
    lives = Lives(network(architecture), seed=5)
    lives.play(50)
    assert lives.guesses >= 30


def test_accepted_draft_tokens_are_not_run_again() -> None:
    followers = DraftModelProposer(network("dense"), 0.1, KNOWN)
    tokens = [5, 6, 7]
    draft = followers.draft({"row": tokens}, 4)["row"]
    widths: list[int] = []

    def counting(fed: mx.array, cache: Any) -> mx.array:
        widths.append(fed.shape[1])
        logits: mx.array = network("dense")(fed, cache=cache)
        return logits

    followers._model = counting  # type: ignore[assignment]
    assert list(followers.draft({"row": [*draft, 9]}, 2)["row"]) == alone(
        network("dense"), [*tokens, *draft, 9], 2
    )
    assert widths == [2, 1]


def test_tokens_that_it_does_not_know_do_no_harm() -> None:
    followers = DraftModelProposer(network("dense"), 0.1, VOCABULARY)
    followers.read("row", [VOCABULARY + 5, 3])
    assert len(followers.draft({"row": [10**6]}, 3)["row"]) == 3
    followers.reset()
    assert followers.length("row") == 0
