"""Rows with skipped prompt spans, alone and in a batch, equal a row in which these spans are masked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.probed_networks import engine_of, network, prompt_of
from tests.worker.sparse import Sparse, begin, hidden, played
from worker.runner.drafters.draft_model import DraftModelProposer
from worker.runner.runner import BatchEngine
from worker.values import SamplingParams

ARCHITECTURES = (
    *("hybrid", "deepseek_v3", "deepseek_v32", "kimi_linear"),
    *("sliding", "gpt_oss", "recurrent_gemma"),
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sparse_prefill_output_equals_dense_output_with_masked_tokens(name: str) -> None:
    engine = engine_of(name)
    assert engine.can_skip_tokens
    rows = {
        "two": Sparse(prompt_of(1, 60), ((10, 24), (30, 41))),
        "dense": Sparse(prompt_of(2, 33)),
        "late": Sparse(prompt_of(3, 52), ((20, 45),)),
    }
    for row, said in played(engine, rows, 24).items():
        assert len(said) >= 12
        assert said == hidden(engine, rows[row], len(said)).tokens


@pytest.mark.parametrize("name", ["sliding", "gemma3n"])
def test_a_window_is_one_of_positions(name: str) -> None:
    """Skipped tokens within a window are not replaced by earlier ones."""
    engine, row = engine_of(name), Sparse(prompt_of(8, 60), ((36, 52),))
    closed_up = Sparse((*row.prompt[:36], *row.prompt[52:]))
    [said] = played(engine, {"a": row}, 12).values()
    assert said == hidden(engine, row, len(said)).tokens
    assert said != hidden(engine, closed_up, len(said)).tokens


def test_a_copy_begins_where_the_row_stands() -> None:
    engine, prompt = engine_of("hybrid"), prompt_of(4, 40)
    engine.prefill({"a": prompt[:12]})
    engine.skip_tokens("a", 12, 22)
    engine.prefill({"a": prompt[22:-1]})
    engine.fork("a", "b")
    for row in "ab":
        engine.start(row, prompt, len(prompt), SamplingParams())
    steps = [engine.step().tokens for _ in range(6)][1:]
    assert [step["a"] for step in steps] == [step["b"] for step in steps]
    assert [step["a"] for step in steps] == hidden(engine, Sparse(prompt, ((12, 22),)), 5).tokens


def test_a_dropped_row_leaves_no_gap_to_the_next_of_its_name() -> None:
    engine, prompt = engine_of("dense"), prompt_of(5, 30)
    engine.prefill({"a": prompt[:10]})
    engine.skip_tokens("a", 10, 15)
    engine.drop("a")
    begin(engine, "a", Sparse(prompt))
    said = [engine.step().tokens for _ in range(5)][1:]
    assert [step["a"] for step in said] == hidden(engine, Sparse(prompt), 4).tokens


def weighed(follower: DraftModelProposer, last: int) -> list[Any]:
    """Return the results of `score_tokens` until it has finished."""
    parts: list[Any] = [follower.score_tokens("a", last)]
    while parts[-1] is None:
        parts.append(follower.score_tokens("a", last))
    return parts


@pytest.mark.parametrize("name", ["hybrid", "sliding", "deepseek_v3"])
def test_a_prompt_is_weighed_token_by_token_and_the_row_goes_on_as_it_was(name: str) -> None:
    follower, prompt = DraftModelProposer(network(name), 0.1, 2048), prompt_of(6, 50)
    follower.read("a", prompt[:-1])
    before = [cache.offset for cache in follower._draft_batches.row("a").caches if hasattr(cache, "offset")]
    parts = weighed(follower, prompt[-1])
    weights = parts[-1]
    assert len(parts) > 4, "the work is divided so that other rows can step in between"
    assert len(weights) == len(prompt) - 1
    assert all(weight >= 0 for weight in weights)
    assert sum(weights) > 0
    assert follower.length("a") == len(prompt) - 1
    assert [
        cache.offset for cache in follower._draft_batches.row("a").caches if hasattr(cache, "offset")
    ] == before


def test_a_network_that_has_only_states_weighs_nothing() -> None:
    for name in ("mamba", "hybrid"):
        engine = BatchEngine(network("dense"), drafter=DraftModelProposer(network(name), 0.1, 2048))
        assert (engine.importance_scorer is None) == (name == "mamba")
