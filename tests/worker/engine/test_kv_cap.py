"""Capped KV caches: rows answer what `mlx_lm.stream_generate(max_kv_size=…)` answers alone, in company."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache

from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from tests.worker import conversations
from tests.worker.zoo import differences, load, play
from worker.contract.engine import CacheSegment, Engine, Model, SamplingParams
from worker.contract.kv_cap import KVCap
from worker.engine.caches import grouping
from worker.engine.engine import BatchEngine

SHORT, LONG, DEFAULT = KVCap(16, step=32), KVCap(50, step=20), KVCap(24)
"""Below a prefill step, above one, and with upstream's step, which is longer than any prompt."""
ROWS = 7
"""`python -m tests.worker.max_kv_size` runs all architectures."""


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "COLUMNS_STEP", 16)


@pytest.mark.parametrize("cap", [SHORT, LONG, DEFAULT])
def test_rows_say_what_they_say_alone(cap: KVCap, oracle: Oracle) -> None:
    assert differences(load("dense", kv_cap=cap), "dense", 0, oracle, ROWS) == []


@pytest.mark.parametrize("cap", [SHORT, DEFAULT])
def test_rows_that_are_fed_drafts_say_what_they_say_alone(cap: KVCap, oracle: Oracle) -> None:
    assert differences(load("dense", kv_cap=cap), "dense", 1, oracle, ROWS, drafted=True) == []


@pytest.mark.parametrize("cap", [SHORT, LONG])
def test_prefix_hits_change_no_answer(cap: KVCap, oracle: Oracle) -> None:
    turns, wrong = conversations.differences(load("dense", kv_cap=cap), "dense", 0, oracle, 14)
    assert wrong == []
    assert sum(turn.cached for turn in turns) > 0.2 * sum(len(turn.prompt) for turn in turns)


def test_the_setting_is_no_placebo(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cap answers differ from those without: otherwise the tests above would prove nothing."""
    monkeypatch.setattr("tests.worker.zoo.settings_of", lambda kv: {})
    assert play(load("dense", kv_cap=SHORT), "dense", 0, oracle, ROWS).differences


@pytest.mark.parametrize("length", [2050, 2051, 2300])
def test_prompts_longer_than_a_prefill_step_are_upstreams(length: int, oracle: Oracle) -> None:
    """Upstream runs token 2,048 of a prompt of 2,050 alone, as those of answers."""
    cap, rng = KVCap(200), random.Random(length)
    prompt = tuple(rng.randrange(2000) for _ in range(length))
    oracle.ask(
        model_folder("dense"),
        [{"tokens": prompt, "max_tokens": 16, "settings": {"max_kv_size": cap.max_size}}],
    )
    engine = load("dense", kv_cap=cap).engine
    try:
        prefill(engine, "row", prompt, 500, cap=cap)
        engine.start("row", prompt, length, SamplingParams())
        said = answer(engine, "row", 16)
    finally:
        [right] = oracle.hear()
    assert said == right["tokens"]


# --- the caches themselves ---


@pytest.fixture(scope="module")
def dense() -> Model:
    return load("dense", kv_cap=SHORT)


def network_of(model: Model) -> Any:
    assert isinstance(model.engine, BatchEngine)
    return model.engine._model


def prefill(
    engine: Engine, row: str, tokens: tuple[int, ...], chunk: int, done: int = 0, cap: KVCap = SHORT
) -> None:
    """Run a prompt in chunks, but for its last token."""
    switch = cap.switch(len(tokens))
    while done < len(tokens) - 1:
        end = min(done + chunk, len(tokens) - 1, switch if done < switch else len(tokens))
        engine.prefill({row: tokens[done:end]})
        done = end
        if done == switch:
            engine.quantize_cache(row)


def upstream_answer(network: Any, prompt: tuple[int, ...], tokens: int) -> list[int]:
    size, keep = SHORT.max_size, SHORT.sinks
    caches = [RotatingKVCache(max_size=size, keep=keep) for _ in network.layers]
    steps = generate_step(
        mx.array(prompt), network, max_tokens=tokens, prompt_cache=caches, prefill_step_size=SHORT.step
    )
    return [token for token, _ in steps]


def answer(engine: Engine, row: str, tokens: int) -> list[int]:
    said: list[int] = []
    while len(said) < tokens:
        said += [token for name, token in engine.step().tokens.items() if name == row]
    return said


@pytest.mark.parametrize("chunk", [1, 7, 32, 90])
@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 20, 33, 34, 35, 66, 90, 98])
def test_chunks_of_a_prompt_change_nothing(dense: Model, length: int, chunk: int) -> None:
    """Upstream runs the last token of a prompt of 34 or 66 tokens but one alone, as those of answers."""
    rng, engine = random.Random(length), dense.engine
    prompt = tuple(rng.randrange(2000) for _ in range(length))
    prefill(engine, "row", prompt, chunk)
    engine.start("row", prompt, length, SamplingParams())
    assert answer(engine, "row", 24) == upstream_answer(network_of(dense), prompt, 24)
    engine.drop("row")


@pytest.mark.parametrize("stop", [2, 12, 16, 40, 64, 70])
def test_prefixes_come_back_from_files_with_their_sinks(dense: Model, stop: int) -> None:
    rng, engine = random.Random(stop), dense.engine
    prompt = tuple(rng.randrange(2000) for _ in range(80))
    runs = [(0, 3), (3, 40), (40, 70)]  # sinks are in two of them
    prefill(engine, "row", prompt[:71], 30)
    cuts, _ = engine.copy_cache("row", runs, states=False)
    engine.drop("row")
    read = [engine.unpack(*engine.pack(cut.payload)).payload for cut in cuts]
    pieces = [
        CacheSegment(payload, first, last, min(last, stop) - first)
        for payload, (first, last) in zip(read, runs, strict=True)
        if first < stop
    ]
    engine.restore("again", pieces, None)
    prefill(engine, "again", prompt, 9, stop)
    engine.start("again", prompt, len(prompt), SamplingParams())
    assert answer(engine, "again", 12) == upstream_answer(network_of(dense), prompt, 12)
    engine.drop("again")


def test_prefixes_without_sinks_are_not_restored(dense: Model) -> None:
    engine, tokens = dense.engine, tuple(range(3, 400))
    for first in range(0, 396, 36):
        engine.prefill({"row": tokens[first : first + 36]})
    [cut, behind], _ = engine.copy_cache("row", [(0, 24), (24, 396)], states=False)
    assert cut.complete_from > 0
    with pytest.raises(ValueError, match="sinks"):
        engine.restore(
            "again", [CacheSegment(cut.payload, 0, 24, 24), CacheSegment(behind.payload, 24, 396, 372)], None
        )
    engine.drop("row")
    engine.drop("again")


# --- bytes ---


def test_a_rows_bytes_are_capped(dense: Model) -> None:
    engine, tokens = dense.engine, tuple(range(3, 103))
    assert engine.row_bytes(16) == engine.row_bytes(4000)
    prefill(engine, "row", tokens, 64)
    engine.start("row", tokens, len(tokens), SamplingParams())
    assert len(answer(engine, "row", 4)) == 4
    assert engine.cache_bytes() == engine.row_bytes(103)
    engine.start("other", (9,), 1, SamplingParams())
    assert len(answer(engine, "other", 40)) == 40
    assert engine.cache_bytes() == 2 * engine.row_bytes(103)
    engine.drop("row")
    engine.drop("other")
    assert engine.cache_bytes() == 0
