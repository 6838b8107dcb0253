"""Capped KV caches: rows answer what `mlx_lm.stream_generate(max_kv_size=…)` answers alone, in company."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache

from tests.oracle import Oracle
from tests.worker import conversations
from tests.worker.kv_bits import network_of, prefill
from tests.worker.zoo import differences, load, play
from worker.contract.engine import CacheSegment, Engine, Model, SamplingParams
from worker.contract.kv_cap import KVCap
from worker.engine.caches import grouping

SHORT, LONG, DEFAULT = KVCap(16, step=32), KVCap(50, step=20), KVCap(24)
"""Below a prefill step, above one, and with upstream's step, which is longer than any prompt."""
ROWS = 6
"""`python -m tests.worker.max_kv_size` runs all architectures."""


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "COLUMNS_STEP", 16)


@pytest.mark.parametrize(("cap", "drafted"), [(LONG, False), (SHORT, True), (DEFAULT, True)])
def test_rows_say_what_they_say_alone(cap: KVCap, drafted: bool, oracle: Oracle) -> None:
    model = load("dense", kv_cap=cap)
    assert differences(model, "dense", int(drafted), oracle, ROWS, drafted=drafted) == []


@pytest.mark.parametrize("cap", [SHORT, LONG])
def test_prefix_hits_change_no_answer(cap: KVCap, oracle: Oracle) -> None:
    turns, wrong = conversations.differences(load("dense", kv_cap=cap), "dense", 0, oracle, 10)
    assert wrong == []
    assert sum(turn.cached for turn in turns) > 0.2 * sum(len(turn.prompt) for turn in turns)


def test_the_setting_is_no_placebo(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cap answers differ from those without: otherwise the tests above would prove nothing."""
    monkeypatch.setattr("tests.worker.zoo.settings_of", lambda kv: {})
    assert play(load("dense", kv_cap=SHORT), "dense", 0, oracle, ROWS).differences


@pytest.fixture(scope="module")
def dense() -> Model:
    return load("dense", kv_cap=SHORT)


def drawn_prompt(length: int) -> tuple[int, ...]:
    rng = random.Random(length)
    return tuple(rng.randrange(2000) for _ in range(length))


def upstream_answer(network: Any, prompt: tuple[int, ...], tokens: int) -> list[int]:
    size, keep = SHORT.max_size, SHORT.sinks
    caches = [RotatingKVCache(max_size=size, keep=keep) for _ in network.layers]
    steps = generate_step(
        mx.array(prompt), network, max_tokens=tokens, prompt_cache=caches, prefill_step_size=SHORT.step
    )
    return [token for token, _ in steps]


def answer(engine: Engine, row: str, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """Start a row whose prompt has been run, and return its first tokens."""
    engine.start(row, prompt, len(prompt), SamplingParams())
    said: list[int] = []
    while len(said) < tokens:
        said += [token for name, token in engine.step().tokens.items() if name == row]
    return said


@pytest.mark.parametrize("length", [1, 17, 34, 98])
def test_chunks_of_a_prompt_change_nothing(dense: Model, length: int) -> None:
    """Upstream runs the last token of a prompt of 34 tokens but one alone, as those of answers."""
    prompt, engine = drawn_prompt(length), dense.engine
    right = upstream_answer(network_of(dense), prompt, 24)
    for chunk in (1 if length == 34 else 7, 90):
        prefill(engine, "row", prompt, SHORT, chunk)
        assert answer(engine, "row", prompt, 24) == right
        engine.drop("row")


@pytest.mark.parametrize("stop", [2, 70])
def test_prefixes_come_back_from_files_with_their_sinks(dense: Model, stop: int) -> None:
    prompt, engine = drawn_prompt(80), dense.engine
    runs = [(0, 3), (3, 40), (40, 70)]  # sinks are in two of them
    prefill(engine, "row", prompt[:71], SHORT, 30)
    cuts, _ = engine.copy_cache("row", runs, states=False)
    engine.drop("row")
    read = [engine.unpack(*engine.pack(cut.payload)).payload for cut in cuts]
    pieces = [
        CacheSegment(payload, first, last, min(last, stop) - first)
        for payload, (first, last) in zip(read, runs, strict=True)
        if first < stop
    ]
    engine.restore("again", pieces, None)
    prefill(engine, "again", prompt, SHORT, 9, stop)
    assert answer(engine, "again", prompt, 12) == upstream_answer(network_of(dense), prompt, 12)
    engine.drop("again")


def test_prefixes_without_sinks_are_not_restored(dense: Model) -> None:
    engine, tokens = dense.engine, tuple(range(3, 400))
    for first in range(0, 396, 36):
        engine.prefill({"row": tokens[first : first + 36]})
    [cut, behind], _ = engine.copy_cache("row", [(0, 24), (24, 396)], states=False)
    assert cut.complete_from > 0
    pieces = [CacheSegment(cut.payload, 0, 24, 24), CacheSegment(behind.payload, 24, 396, 372)]
    with pytest.raises(ValueError, match="sinks"):
        engine.restore("again", pieces, None)
    engine.drop("row")
    engine.drop("again")


def test_a_rows_bytes_are_capped(dense: Model) -> None:
    engine, tokens = dense.engine, tuple(range(3, 103))
    assert engine.row_bytes(16) == engine.row_bytes(4000)
    prefill(engine, "row", tokens, SHORT, 64)
    assert len(answer(engine, "row", tokens, 4)) == 4
    assert engine.cache_bytes() == engine.row_bytes(103)
    assert len(answer(engine, "other", (9,), 40)) == 40
    assert engine.cache_bytes() == 2 * engine.row_bytes(103)
    engine.drop("row")
    engine.drop("other")
    assert engine.cache_bytes() == 0
