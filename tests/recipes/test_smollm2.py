"""Conversion of a GGUF file to a model folder, tested without the real file."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from recipes.smollm2 import convert

HEADS, HEAD_DIM, WIDTH = 3, 8, 32
METADATA: dict[str, Any] = {
    "llama.attention.head_count": mx.array(2 * HEADS),
    "llama.attention.head_count_kv": mx.array(HEADS),
    "tokenizer.ggml.tokens": ["<|end|>", "1", "2", "a", "Ġ", "aa", "12"],
    "tokenizer.ggml.token_type": mx.array([3, 1, 1, 1, 1, 1, 1]),
    "tokenizer.ggml.merges": ["a a", "1 2"],
}


def rows(heads: int) -> mx.array:
    return mx.arange(heads * HEAD_DIM * WIDTH, dtype=mx.float32).reshape(heads * HEAD_DIM, WIDTH)


def permute(weights: mx.array, heads: int) -> mx.array:
    """Apply llama.cpp's permutation, which interleaves the two halves of each head."""
    count, width = weights.shape
    return weights.reshape(heads, 2, count // heads // 2, width).swapaxes(1, 2).reshape(count, width)


def test_unpermute_is_the_inverse_of_the_permutation_of_llama_cpp() -> None:
    permuted = permute(rows(HEADS), HEADS)
    assert not mx.array_equal(permuted, rows(HEADS))
    assert mx.array_equal(convert.unpermute(permuted, HEADS), rows(HEADS))


def test_only_query_and_key_projections_are_unpermuted() -> None:
    heads = {"attn_q": 2 * HEADS, "attn_k": HEADS}
    stored = {f"blk.0.{module}.weight": permute(rows(count), count) for module, count in heads.items()}
    stored["blk.0.attn_v.weight"] = rows(HEADS)
    result = convert.unpermute_all(stored, METADATA)
    assert mx.array_equal(result["blk.0.attn_q.weight"], rows(2 * HEADS))
    assert mx.array_equal(result["blk.0.attn_k.weight"], rows(HEADS))
    assert mx.array_equal(result["blk.0.attn_v.weight"], rows(HEADS))


def test_dequantize_finds_the_bits_of_each_module() -> None:
    weights = {"model.norm.weight": mx.ones(WIDTH)}
    for module, bits in (("embed", 8), ("gate", 4), ("up", 4)):
        parts = mx.quantize(rows(1), group_size=convert.GROUP_SIZE, bits=bits)
        names = ("weight", "scales", "biases")
        weights |= {f"{module}.{name}": part for name, part in zip(names, parts, strict=True)}
    bits_by_module = convert.quantized_bits(weights)
    settings = convert.quantization_config(bits_by_module)
    assert settings["bits"] == 4
    assert settings["embed"]["bits"] == 8
    dequantized = convert.dequantize(weights)
    assert dequantized.keys() == {"model.norm.weight", "embed.weight", "gate.weight", "up.weight"}
    np.testing.assert_allclose(np.array(dequantized["gate.weight"]), np.array(rows(1)), atol=31 / 15)


def test_tokenizer_splits_at_each_digit_and_keeps_special_tokens_whole() -> None:
    tokenizer = convert.make_tokenizer(METADATA)
    # The merge of "1" and "2" must not be applied: they are split before.
    assert tokenizer.encode("aa 12<|end|>").tokens == ["aa", "Ġ", "1", "2", "<|end|>"]
    assert tokenizer.decode([5, 4, 1, 2, 0]) == "aa 12"
