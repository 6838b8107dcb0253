"""Quantized KV caches: rows answer what `mlx_lm.stream_generate` answers on such caches alone."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from tests.oracle import Oracle
from tests.worker import conversations
from tests.worker.kv_bits import network_of
from tests.worker.zoo import differences, load, play
from worker.interfaces import Engine, Model
from worker.runner.kv import buckets, snapshots
from worker.runner.trees import held_bytes
from worker.values import CacheSegment, KVQuantization, SamplingParams

FOUR, EIGHT = KVQuantization(4, 32), KVQuantization(8, 32)
ROWS = 6
PLAYED = [("nemotron_h", FOUR, False), ("dense", EIGHT, True), ("hybrid", FOUR, True)]
REUSED = [("dense", FOUR), ("hybrid", EIGHT)]
"""`python -m tests.worker.kv_bits` runs all architectures."""


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "COLUMNS_STEP", 16)


@pytest.mark.parametrize(("architecture", "kv", "drafted"), PLAYED)
def test_rows_answer_as_alone(architecture: str, kv: KVQuantization, drafted: bool, oracle: Oracle) -> None:
    model = load(architecture, kv_quantization=kv)
    assert differences(model, architecture, int(drafted), oracle, ROWS, drafted=drafted) == []


@pytest.mark.parametrize(("architecture", "kv"), REUSED)
def test_prefix_hits_change_no_answer(architecture: str, kv: KVQuantization, oracle: Oracle) -> None:
    model = load(architecture, kv_quantization=kv)
    turns, wrong = conversations.differences(model, architecture, 0, oracle, 10)
    assert wrong == []
    assert sum(turn.cached for turn in turns) > 0.2 * sum(len(turn.prompt) for turn in turns)


def test_the_setting_is_no_placebo(oracle: Oracle) -> None:
    """With four bits, answers differ from exact ones: otherwise the tests above would prove nothing."""
    model = load("dense", kv_quantization=FOUR)
    claimed = replace(model, info=replace(model.info, kv_quantization=None))
    assert play(claimed, "dense", 0, oracle, ROWS).differences


@pytest.fixture(scope="module")
def dense() -> Model:
    return load("dense", kv_quantization=FOUR)


def upstream_caches(network: Any, prompt: tuple[int, ...], kv: KVQuantization) -> list[Any]:
    """Return upstream's caches, quantized from the first token on, after a prompt."""
    caches = [cache.to_quantized(**asdict(kv)) for cache in make_prompt_cache(network)]
    assert len(list(generate_step(mx.array(prompt), network, max_tokens=1, prompt_cache=caches))) == 1
    return caches


@pytest.mark.parametrize("length", [2, 34, 90])
def test_a_rows_cache_is_upstreams(dense: Model, length: int) -> None:
    """Even one token computed on exact keys would differ by far more than rounding."""
    rng, engine = random.Random(length), dense.engine
    prompt = tuple(rng.randrange(2000) for _ in range(length))
    right = upstream_caches(network_of(dense), prompt, FOUR)
    for chunk in (7, 90):
        prefill(engine, "row", prompt, chunk)
        [cut], _ = engine.copy_cache("row", [(0, length - 1)], states=False)
        engine.drop("row")
        assert isinstance(cut.payload, snapshots.KVSlice)
        for leaves, cache in zip(cut.payload.layers, right, strict=True):
            for found, theirs in zip((leaves[:3], leaves[3:]), cache.keys_and_values(), strict=True):
                restored = mx.dequantize(*found, group_size=32, bits=4)
                expected = [leaf[..., : length - 1, :] for leaf in theirs]
                apart = mx.abs(restored - mx.dequantize(*expected, group_size=32, bits=4))
                # A value on the border between two steps may round to either.
                assert float(mx.mean(apart > 1e-4)) < 0.005


def prefill(engine: Engine, row: str, prompt: tuple[int, ...], chunk: int) -> None:
    """Run a prompt in chunks, but for its last token."""
    for first in range(0, len(prompt) - 1, chunk):
        engine.prefill({row: prompt[first : min(first + chunk, len(prompt) - 1)]})


def test_stored_slices_come_back_from_files_as_they_were(dense: Model) -> None:
    engine, prompt = dense.engine, tuple(range(5, 75))
    engine.prefill({"row": prompt[:60]})
    cuts, _ = engine.copy_cache("row", [(0, 32), (32, 60)], states=False)
    read = [engine.unpack(*engine.pack(cut.payload)).payload for cut in cuts]
    engine.restore("again", [CacheSegment(read[0], 0, 32, 32), CacheSegment(read[1], 32, 60, 60 - 32)], None)
    whole = [engine.copy_cache(row, [(0, 60)], states=False)[0][0].payload for row in ("row", "again")]
    engine.drop("row")
    engine.drop("again")
    one, other = (payload.layers for payload in whole if isinstance(payload, snapshots.KVSlice))
    assert all(
        mx.array_equal(mine, its).item()
        for mine_of, its_of in zip(one, other, strict=True)
        for mine, its in zip(mine_of, its_of, strict=True)
    )


def test_masks_of_rows_are_not_taken_for_those_of_heads(dense: Model) -> None:
    """As many rows as key heads, or as query heads: a mask with one axis too few would fit silently."""
    engine, rng = dense.engine, random.Random(4)
    prompts = {f"{row}": tuple(rng.randrange(2000) for _ in range(12 + 17 * row)) for row in range(4)}
    alone = {row: answer(engine, {row: prompt})[row] for row, prompt in prompts.items()}
    for rows in (["0", "1"], [*prompts]):
        assert answer(engine, {row: prompts[row] for row in rows}) == {row: alone[row] for row in rows}


def answer(engine: Engine, prompts: dict[str, tuple[int, ...]], tokens: int = 12) -> dict[str, list[int]]:
    for row, prompt in prompts.items():
        prefill(engine, row, prompt, 16)
        engine.start(row, prompt, len(prompt), SamplingParams())
    said: dict[str, list[int]] = {row: [] for row in prompts}
    for _ in range(tokens + 1):
        for row, token in engine.step().tokens.items():
            said[row].append(token)
    engine.reset()
    return said


def test_a_rows_bytes_are_those_that_it_takes(dense: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "COLUMNS_STEP", 256)  # as upstream's
    engine, tokens = dense.engine, tuple(range(3, 103))
    engine.prefill({"row": tokens})
    caches = upstream_caches(network_of(dense), tokens, FOUR)
    assert engine.row_bytes(240) == engine.cache_bytes() == sum(map(held_bytes, caches))
    engine.drop("row")
