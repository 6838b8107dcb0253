"""MTP layers propose what upstream's module does from the same hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model
from mlx_vlm.speculative.drafters import load_drafter

from tests.models.fixtures import model_folder
from tests.models.mtp_models import HEADS, PROMPTS, UNTIED, answer_of, hidden_of
from worker.load.drafters.mtp_layers import load_own_layers
from worker.runner.drafters import mtp
from worker.runner.drafters.mtp import HiddenStateProposer

COUNT = 3
ROUNDS = 12
KEPT = 64


@pytest.fixture(params=[HEADS, UNTIED])
def folder(request: pytest.FixtureRequest) -> Path:
    return model_folder(request.param)


@pytest.fixture
def network(folder: Path) -> Any:
    return load_model(folder)[0]


def loaded(folder: Path, network: Any) -> HiddenStateProposer:
    heads = load_own_layers(folder, network, "tiny")
    assert heads is not None
    return heads


def right_of(guesses: list[int], said: list[int], known: int) -> int:
    right = 0
    while right < len(guesses) and guesses[right] == said[known + right]:
        right += 1
    return right


def by_itself(folder: Path, network: Any, said: list[int], prompt: int) -> list[list[int]]:
    """Return the drafts of upstream's module for each round, with its own catch-up."""
    module: Any = load_drafter(str(folder))[0]
    hidden = hidden_of(network, said)
    module.reset(network)
    known, rounds = prompt + 1, []
    sampler = mx.argmax
    bonus = mx.array([said[prompt]])
    module.prefill_from_target_hidden(mx.array([said[:prompt]]), hidden, bonus, sampler, greedy=True)
    for _ in range(ROUNDS):
        last = hidden[:, known - 2 : known - 1]
        drafts = module.draft_block(said[known - 1], last, None, COUNT + 1, sampler, greedy=True)
        rounds.append([int(token) for token in drafts[0].tolist()])
        right = right_of(rounds[-1], said, known)
        new = said[known : known + right + 1]
        module.accept_verified_tokens(hidden[:, known - 1 :], drafts, right, new, sampler, greedy=True)
        known += right + 1
    return rounds


def ours(heads: HiddenStateProposer, network: Any, said: list[int], prompt: int, row: str) -> list[list[int]]:
    """Return our proposer's drafts for each round. It gets each hidden state as it is computed."""
    network(mx.array([said[:prompt]]))
    heads.on_hidden_states([row], [prompt])
    known, rounds = prompt + 1, []
    for _ in range(ROUNDS):
        heads.read(row, said[heads.length(row) : known - 1]) if known - heads.length(row) > 8 else None
        drafts = heads.draft({row: said[heads.length(row) : known]}, COUNT)[row]
        rounds.append(list(drafts))
        right = right_of(rounds[-1], said, known)
        network(mx.array([said[: known + right]]))
        heads.on_hidden_states([row], [known + right], [0])
        known += right + 1
    return rounds


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_guesses_are_those_of_upstreams_module(prompt: tuple[int, ...], folder: Path, network: Any) -> None:
    said = answer_of(network, prompt, ROUNDS * (COUNT + 1) + 1)
    alone = by_itself(folder, network, said, len(prompt))
    assert ours(loaded(folder, network), network, said, len(prompt), "row") == alone
    assert any(guesses[0] in said for guesses in alone)


def test_a_gap_begins_anew_within_bounds(folder: Path, network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp, "PENDING_TOKENS_MAX", KEPT)
    heads = loaded(folder, network)
    tokens = [place % 1900 for place in range(3 * KEPT)]
    heads.skip("row", 5)
    network(mx.array([tokens[5:]]))
    heads.on_hidden_states(["row"], [len(tokens) - 5])
    assert heads.length("row") == len(tokens) - KEPT + 1
    heads.read("row", tokens[heads.length("row") :])
    assert len(heads.draft({"row": [7, 8]}, 2)) == 0, "the last token's hidden state is missing"
    network(mx.array([[1, 2]]))
    heads.on_hidden_states(["row"], [2], [len(tokens) + 10])
    assert heads.length("row") == len(tokens) + 11
    assert len(heads.draft({"row": [7, 8]}, 2)["row"]) == 2
    heads.drop("row")
    assert heads.cache_bytes() == 0
