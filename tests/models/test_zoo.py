"""The zoo has each kind of cache, in models varied enough to reveal an error."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.models.fixtures import model_folder
from tests.models.zoo import ZOO
from tests.models.zoo_parts import WINDOW

KINDS = {
    "afm7": ["KVCache"] * 2,
    "baichuan_m1": ["CacheList(ArraysCache, RotatingKVCache)", "CacheList(ArraysCache, KVCache)"],
    "deepseek_v3": ["KVCache"] * 2,
    "deepseek_v32": ["CacheList(KVCache, KVCache)"] * 2,
    "deepseek_v41": ["LayerCache"] * 2,
    "exaone4": ["RotatingKVCache", "RotatingKVCache", "KVCache", "RotatingKVCache"],
    "falcon_h1": ["CacheList(ArraysCache, KVCache)"] * 2,
    "gemma3n": ["RotatingKVCache", "RotatingKVCache", "KVCache"],
    "gemma4": ["RotatingKVCache", "RotatingKVCache", "KVCache"],
    "gpt_oss": ["RotatingKVCache", "KVCache"] * 2,
    "granitemoehybrid": ["ArraysCache", "KVCache", "ArraysCache"],
    "iquestloopcoder": ["KVCache", "KVCache", "RotatingKVCache", "RotatingKVCache"],
    "jamba": ["ArraysCache", "KVCache", "ArraysCache"],
    "kimi_linear": ["ArraysCache", "KVCache", "ArraysCache"],
    "lfm2": ["ArraysCache", "KVCache", "ArraysCache"],
    "llama": ["KVCache"] * 2,
    "llama4": ["ChunkedKVCache"] * 3 + ["KVCache"],
    "llama_4bit": ["KVCache"] * 2,
    "llama_sliding": ["RotatingKVCache", "RotatingKVCache", "KVCache"],
    "longcat_flash": ["CacheList(KVCache, KVCache)"] * 2,
    "longcat_flash_ngram": ["ArraysCache"] + ["CacheList(KVCache, KVCache)"] * 2,
    "mamba": ["ArraysCache"] * 2,
    "mamba2": ["ArraysCache"] * 2,
    "mixtral": ["KVCache"] * 2,
    "nemotron_h": ["ArraysCache", "KVCache", "ArraysCache"],
    "olmo3": ["RotatingKVCache", "RotatingKVCache", "KVCache"],
    "plamo2": ["ArraysCache", "KVCache"],
    "qwen3_moe": ["KVCache"] * 2,
    "qwen3_next": ["ArraysCache"] * 3 + ["KVCache"],
    "recurrent_gemma": ["ArraysCache", "ArraysCache", "RotatingKVCache"],
    "rwkv7": ["ArraysCache"] * 2,
}


def kind(cache: Any) -> str:
    name = type(cache).__name__
    return f"{name}({', '.join(map(kind, cache.caches))})" if hasattr(cache, "caches") else name


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens)]


@pytest.mark.parametrize("name", ZOO)
def test_it_loads_with_its_caches_and_is_lively(name: str) -> None:
    model, _ = load_model(model_folder(name))
    assert [kind(cache) for cache in make_prompt_cache(model)] == KINDS[name]

    rng = random.Random(0)
    prompt = [rng.randrange(2000) for _ in range(2 * WINDOW)]
    answer = greedy(model, prompt, 24)
    assert len(set(answer)) > 10, "the output repeats itself"

    prompts = [prompt, [prompt[0] + 1, *prompt[1:]]]
    logits, other = (model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1] for tokens in prompts)
    assert 2.0 < float(mx.std(logits)) < 8.0
    assert float(mx.abs(logits - other).max()) > 0.1, "the logits do not depend on the prompt's first tokens"


def test_every_cache_that_upstream_batches_is_there() -> None:
    kinds = " ".join(kind for kinds in KINDS.values() for kind in kinds)
    for name in ("KVCache", "RotatingKVCache", "ArraysCache", "CacheList", "ChunkedKVCache"):
        assert name in kinds
