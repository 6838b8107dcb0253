"""Trained drafters propose for joining and leaving rows what upstream's module does alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from mlx_vlm.speculative.drafters import load_drafter

from tests.models.drafters import BLOCK, hidden_of
from tests.models.fixtures import model_folder
from tests.models.mtp_models import PROMPTS, answer_of
from worker.load.drafters.draft_model import find_draft
from worker.load.drafters.trained_drafters import load_trained
from worker.runner.drafters.hidden_state_proposer import HiddenStateProposer
from worker.values import BACKLOG_MAX

STEPS = 6
ROWS = 4
ANSWER_TOKENS = 30


def loaded(name: str) -> tuple[HiddenStateProposer, Any]:
    """Return the drafter and its target network."""
    network = load_model(model_folder(name.partition("_")[0]))[0]
    return load_trained(find_draft(str(model_folder(name))), network), network


class Alone:
    """Upstream's module, given all tokens and hidden states of one row at once."""

    def __init__(self, name: str) -> None:
        self.network = load_model(model_folder(name.partition("_")[0]))[0]
        self.module: Any = load_drafter(str(model_folder(name)))[0]
        self.is_eagle = "eagle" in name
        # Further requirements on the target model concern only upstream's own rounds.
        if hasattr(self.module, "validate_target_compatibility"):
            type(self.module).validate_target_compatibility = lambda module, target: None
        config = self.module.config
        self.numbers = config.capture_layer_ids if self.is_eagle else config.target_layer_ids

    def guesses(self, tokens: list[int], first: int, count: int) -> list[int]:
        """Propose `count` tokens after `tokens`, with hidden states from position `first` on."""
        hidden = hidden_of(self.network, mx.array([tokens]), self.numbers)[:, first:-1]
        cache = self.module.reset(self.network)
        if self.is_eagle:
            known, bonus = mx.array([tokens[first:-1]]), tokens[-1]
            self.module.prefill_from_target_hidden(known, hidden, bonus, None, greedy=True)
            drafts = self.module.draft_block(bonus, hidden, cache, count + 1, None, greedy=True)
        else:
            likeliest = lambda logits: mx.argmax(logits, axis=-1)  # noqa: E731
            drafts = self.module.draft_block(tokens[-1], hidden, cache, min(count + 1, BLOCK), likeliest)
        told: Any = drafts[0].tolist()
        return [int(token) for token in told]


@dataclass
class Row:
    """A row. Its first `known` tokens are accepted, with hidden states for all but the last."""

    tokens: list[int]
    known: int
    first: int = 0


class Lives:
    """Rows whose tokens are computed in advance; some begin with a cached prefix."""

    def __init__(self, name: str) -> None:
        self.heads, self.network = loaded(name)
        self.alone = Alone(name)
        self.dice = random.Random(0)
        self.rows: dict[str, Row] = {}
        self.count = 0

    def join(self) -> None:
        """Add a row, of whose prompt a part may be cached."""
        prompt = PROMPTS[self.count % len(PROMPTS)][: self.dice.choice((20, 20, self.dice.randint(2, 20)))]
        name, self.count = f"row {self.count}", self.count + 1
        row = Row(answer_of(self.network, prompt, ANSWER_TOKENS), len(prompt))
        if self.dice.random() < 0.4:
            row.first = self.dice.randrange(len(prompt) - 1)
            self.heads.skip(name, row.first)
        self.rows[name] = row
        self.hear(name, row.first, len(prompt))

    def hear(self, name: str, first: int, end: int) -> None:
        """Run the model over a row's tokens `first` to `end`."""
        caches = make_prompt_cache(self.network)
        if first:
            self.network(mx.array([self.rows[name].tokens[:first]]), cache=caches)
        self.network(mx.array([self.rows[name].tokens[first:end]]), cache=caches)
        self.heads.on_hidden_states([name], [end - first], [first])

    def step(self) -> None:
        asked = [name for name in self.rows if self.dice.random() < 0.8]
        new_tokens, count = {}, self.dice.randint(1, 6)
        for name in asked:
            row = self.rows[name]
            late = row.tokens[self.heads.length(name) : row.known + 1]
            if len(late) > BACKLOG_MAX:
                self.heads.read(name, late[:-2])
                late = late[-2:]
            new_tokens[name] = late
        for name, draft in (self.heads.draft(new_tokens, count) if new_tokens else {}).items():
            row = self.rows[name]
            assert list(draft) == self.alone.guesses(row.tokens[: row.known + 1], row.first, count), name
        for name, row in list(self.rows.items()):
            end = row.known + self.dice.randint(1, 4)
            if end + BLOCK >= len(row.tokens):
                self.heads.drop(name)
                del self.rows[name]
                continue
            self.hear(name, row.known, end)
            row.known = end


@pytest.mark.parametrize(
    "name",
    [
        "dense_eagle3",
        "dense_eagle3_whole",
        "dense_dflash",
        "dense_dflash_sliding",
        "dense_dflash2",
        "dense_dspark",
    ],
)
def test_guesses_are_those_of_upstreams_module(name: str) -> None:
    lives = Lives(name)
    for _ in range(STEPS):
        while len(lives.rows) < ROWS:
            lives.join()
        lives.step()
    lives.heads.reset()
    assert lives.heads.cache_bytes() == 0
