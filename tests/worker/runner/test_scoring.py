"""Prompt logprobs against one forward pass of upstream's model over the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.worker.probed_networks import MODELS, engine_of, network, prompt_of
from worker.runner.runner import BatchEngine
from worker.runner.sampling import logprobs
from worker.values import Logprob, LogprobTargets, SamplingParams

TOLERANCE = 1e-4


def whole(name: str, tokens: Sequence[int]) -> mx.array:
    """Return the log-probabilities [positions, vocabulary] of one pass."""
    logits = network(name)(mx.array([list(tokens)]))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def check(name: str, tokens: Sequence[int], found: Sequence[Logprob], top: int, first: int = 1) -> None:
    """Compare `found`, the logprobs of the tokens from index `first` on, with upstream's."""
    expected = whole(name, tokens)
    assert len(found) == len(tokens) - first
    for position, likelihood in enumerate(found, start=first):
        row = expected[position - 1]
        assert likelihood.logprob == pytest.approx(row[tokens[position]].item(), abs=TOLERANCE)
        assert len(likelihood.top) == top
        best = mx.sort(row)[::-1][:top].tolist()
        assert [each for _, each in likelihood.top] == pytest.approx(best, abs=TOLERANCE)
        for token, each in likelihood.top:
            assert each == pytest.approx(row[token].item(), abs=TOLERANCE)


def scored(engine: BatchEngine, row: str, prompt: Sequence[int], chunk: int, top: int) -> list[Logprob]:
    found: list[Logprob] = []
    for first in range(0, len(prompt) - 1, chunk):
        last = min(first + chunk, len(prompt) - 1)
        asked = LogprobTargets(tuple(prompt[first + 1 : last + 1]), top)
        found += engine.prefill({row: prompt[first:last]}, {row: asked})[row]
    return found


def answered(engine: BatchEngine, row: str, prompt: Sequence[int], count: int) -> list[int]:
    engine.start(row, prompt, len(prompt), SamplingParams())
    steps = [engine.step() for _ in range(count + 1)]
    engine.drop(row)
    return [step.tokens[row] for step in steps if row in step.tokens]


@pytest.mark.parametrize(
    ("name", "chunk", "piece"), [("dense", 1000, 2**24), ("hybrid", 33, 2**24), ("sliding", 33, 7 * 2048)]
)
def test_cuts_change_no_logprobs(name: str, chunk: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_MAX", piece)
    prompt = prompt_of(1, 100)
    engine = engine_of(name)
    check(name, prompt, scored(engine, "a", prompt, chunk, top=5), top=5)
    plain = engine_of(name)
    plain.prefill({"a": prompt[:-1]})
    assert answered(engine, "a", prompt, 12) == answered(plain, "a", prompt, 12)


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_ask_and_rows_that_do_not_run_in_one_call(name: str) -> None:
    prompts = {row: prompt_of(seed, 20 + seed) for seed, row in enumerate("abcd", start=1)}
    engine, plain = engine_of(name), engine_of(name)
    targets = {"b": LogprobTargets(prompts["b"][1:], 0), "d": LogprobTargets(prompts["d"][1:], 2)}
    found = engine.prefill({row: prompt[:-1] for row, prompt in prompts.items()}, targets)
    assert found.keys() == {"b", "d"}
    check(name, prompts["b"], found["b"], top=0)
    check(name, prompts["d"], found["d"], top=2)
    assert plain.prefill({row: prompt[:-1] for row, prompt in prompts.items()}) == {}
    for row, prompt in prompts.items():
        assert answered(engine, row, prompt, 8) == answered(plain, row, prompt, 8)


def test_the_logits_of_a_long_chunk_are_never_all_there() -> None:
    class Wide(nn.Module):
        """A vocabulary so large that the logits of all positions would take 512 MB."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.layers = inner.layers

        def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
            return mx.tile(self.inner(tokens, cache=cache), (1, 1, 64))

    prompt = prompt_of(4, 1025)
    engine = BatchEngine(Wide(network("dense")))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = engine.prefill({"a": prompt[:-1]}, {"a": LogprobTargets(prompt[1:], 5)})["a"]
    assert len(found) == 1024
    assert mx.get_peak_memory() - before < 400 * 2**20
