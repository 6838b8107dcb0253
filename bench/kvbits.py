"""Quantized KV caches beside exact ones: decode speed, bytes per token, perplexity and answers.

    python -m bench.kvbits .venv/models/smollm2 [--tokens 1024 8192 16384] [--rounds 5] [--steps 16]

Each round decodes some steps of one row with exact, 8-bit and 4-bit caches in turns, behind a cache of random
keys and values, and gives the ratios of tokens/s to the exact cache's; medians over all rounds. Perplexity is
that of `--text` (README.md) in chunks, each token on the caches of those before it. Answers: how many of the
first tokens after a part of the text are the exact cache's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load

from worker.common_prefix import common_prefix_length
from worker.process.preload import preload_openblas
from worker.runner.kv.row_caches import fresh_caches, quantized, row_cost
from worker.values import KVQuantization

FORMS = {"exact": None, "8 bit": KVQuantization(8), "4 bit": KVQuantization(4)}
CHUNK_TOKENS = 256
PROMPT_TOKENS, ANSWER_TOKENS = 256, 32


def filled(network: Any, tokens: int, kv: KVQuantization | None) -> list[Any]:
    """Return the caches of a row of `tokens` random tokens. All layers must have full attention."""
    caches = fresh_caches(network)
    network(mx.array([[0]]), cache=caches)
    cache: Any
    for cache in caches:
        assert type(cache).__name__ == "KVCache", "only for models with full attention in all layers"
        shape = (1, cache.keys.shape[1], tokens, cache.keys.shape[3])
        cache.keys, cache.values = (
            mx.random.normal(shape).astype(leaf.dtype) for leaf in (cache.keys, cache.values)
        )
        cache.offset = tokens
    caches = caches if kv is None else quantized(caches, kv)
    network(mx.array([[1]]), cache=caches)  # grows the buffers
    mx.eval([cache.state for cache in caches])
    return caches


def tokens_per_s(network: Any, caches: list[Any], steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        mx.eval(network(mx.array([[1]]), cache=caches), [cache.state for cache in caches])
    return steps / (time.perf_counter() - began)


def perplexity(network: Any, tokens: list[int], kv: KVQuantization | None) -> float:
    caches, losses = fresh_caches(network, kv), list[float]()
    for first in range(0, len(tokens) - 1, CHUNK_TOKENS):
        last = min(first + CHUNK_TOKENS, len(tokens) - 1)
        logits = network(mx.array([tokens[first:last]]), cache=caches)[0].astype(mx.float32)
        following = mx.array(tokens[first + 1 : last + 1])[:, None]
        chosen = mx.take_along_axis(logits, following, axis=-1)[:, 0]
        lost: Any = (mx.logsumexp(logits, axis=-1) - chosen).tolist()
        losses += lost
    return math.exp(statistics.mean(losses))


def answer(network: Any, tokens: list[int], kv: KVQuantization | None) -> list[int]:
    caches, fed, said = fresh_caches(network, kv), tokens[:PROMPT_TOKENS], list[int]()
    for _ in range(ANSWER_TOKENS):
        token: Any = mx.argmax(network(mx.array([fed]), cache=caches)[0, -1]).item()
        said.append(int(token))
        fed = said[-1:]
    return said


def main() -> None:
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description="Quantized KV caches beside exact ones.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".venv/models/smollm2"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    parser.add_argument("--text-tokens", type=int, default=1024)
    arguments = parser.parse_args()
    network, tokenizer, *_ = load(str(arguments.folder))
    model: Any = network
    costs = {name: row_cost(model, fresh_caches(model, kv)) for name, kv in FORMS.items()}
    each = {name: sum(growing for growing, _ in cost.growing) for name, cost in costs.items()}
    width = next(iter(model.parameters()["model"]["layers"][0]["input_layernorm"].values())).dtype.size
    for name, size in each.items():
        print(f"{name}: {size} bytes per token, {size / (each['exact'] * 2 / width):.3f} of 16 bits")
    text: list[int] = tokenizer.encode(arguments.text.read_text(encoding="utf-8"))[: arguments.text_tokens]
    exact = answer(model, text, None)
    for name, kv in FORMS.items():
        said = answer(model, text, kv)
        same = common_prefix_length(exact, said)
        found = perplexity(model, text, kv)
        print(f"{name}: perplexity {found:.4f} over {len(text)} tokens, {same} of {len(said)} tokens equal")
    for tokens in arguments.tokens:
        caches = {name: filled(model, tokens, kv) for name, kv in FORMS.items()}
        rates: dict[str, list[float]] = {name: [] for name in FORMS}
        for _ in range(arguments.rounds):
            for name in FORMS:
                rates[name].append(tokens_per_s(model, caches[name], arguments.steps))
        for name, rate in rates.items():
            ratio = statistics.median(one / other for one, other in zip(rate, rates["exact"], strict=True))
            print(f"{tokens} tokens, {name}: {statistics.median(rate):.1f} tokens/s, {ratio:.2f} of exact")


if __name__ == "__main__":
    main()
