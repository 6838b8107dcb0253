"""Conversion of a GGUF file of the Llama architecture to the files of a Hugging Face model folder.

The formats differ in three things. The tensors have other names. The rows of the query and key projections
have another order, since the rotary embedding pairs neighbouring values in llama.cpp, and value i with value
i + head_dim / 2 in the Hugging Face layout. The tokenizer is in the metadata of a GGUF file.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Metadata = dict[str, Any]

SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""Sampling that the model's card recommends. So small a model talks nonsense at temperature 1."""
GROUP_SIZE = 32
"""Weights that share a scale, in each of llama.cpp's block formats. MLX reads a block of Q4_1 as 4-bit affine
quantization and one of Q8_0 (the embedding's) as 8-bit, both without loss."""

_CONTROL = 3
"""The type of special tokens in `tokenizer.ggml.token_type`."""

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_folder(gguf: Path, folder: Path, quantized: bool) -> None:
    """Write the model folder. `quantized` keeps the quantized weights of the file; otherwise all are float32.

    Raises `ValueError` for a file of another model.
    """
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    tensors, metadata = loaded
    if metadata["general.architecture"] != "llama" or metadata["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"{gguf} is not a SmolLM2 model")
    folder.mkdir(parents=True, exist_ok=True)
    weights = rename(unpermute_all(tensors, metadata))
    bits = quantized_bits(weights) if quantized else {}
    weights = with_float32_scales(weights) if quantized else dequantize(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(folder / "config.json", model_config(metadata, bits))
    _write_json(folder / "generation_config.json", generation_config(metadata))
    make_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))


# --- weights -----------------------------------------------------------------------------------------


def hugging_face_name(name: str) -> str:
    """Return the name in the Hugging Face layout: `model.layers.3.self_attn.q_proj.weight` for
    `blk.3.attn_q.weight`."""
    *place, module, kind = name.split(".")
    layer = f"model.layers.{place[1]}." if place else ""
    return f"{layer}{_MODULES[module]}.{kind}"


def rename(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    return {hugging_face_name(name): tensor for name, tensor in tensors.items()}


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """Reorder the rows (heads × head_dim) of a projection from llama.cpp's order to that of Hugging Face.

    Within a head, rows 0, 2, 4, … become its first half and rows 1, 3, 5, … its second half. Scales and
    biases are reordered like their weights: no group spans two rows.
    """
    count, width = rows.shape
    pairs = rows.reshape(heads, count // heads // 2, 2, width)
    return mx.contiguous(pairs.swapaxes(1, 2).reshape(count, width))


def unpermute_all(tensors: dict[str, mx.array], metadata: Metadata) -> dict[str, mx.array]:
    heads = {
        "attn_q": int(metadata["llama.attention.head_count"]),
        "attn_k": int(metadata["llama.attention.head_count_kv"]),
    }
    modules = {name: name.split(".")[-2] for name in tensors}
    return {
        name: unpermute(tensor, heads[modules[name]]) if modules[name] in heads else tensor
        for name, tensor in tensors.items()
    }


def quantized_bits(weights: dict[str, mx.array]) -> dict[str, int]:
    """Return the bits per weight of each quantized module. Weights are packed into words of 32 bits."""
    modules = [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]
    words = {module: weights[f"{module}.weight"].shape[-1] for module in modules}
    groups = {module: weights[f"{module}.scales"].shape[-1] for module in modules}
    return {module: words[module] * 32 // (groups[module] * GROUP_SIZE) for module in modules}


def dequantize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return all weights in float32. Scales and biases become float32 first, so that products are not
    rounded."""
    result: dict[str, mx.array] = {}
    bits = quantized_bits(weights)
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        if module in bits:
            scales, biases = (weights[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            weight = mx.dequantize(weight, scales, biases, group_size=GROUP_SIZE, bits=bits[module])
        result[name] = weight.astype(mx.float32)
    return result


def with_float32_scales(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return quantized weights with float32 scales, biases and norms, which set the type of all activations.

    MLX computes float16 in software on a CPU, 30 to 80 times slower than float32.
    """
    return {
        name: weight.astype(mx.float32) if weight.dtype == mx.float16 else weight
        for name, weight in weights.items()
    }


# --- configuration -----------------------------------------------------------------------------------


def quantization_config(bits: dict[str, int]) -> dict[str, Any]:
    """Return MLX's quantization settings: the bits of most modules, and by name those of the others."""
    usual = statistics.mode(bits.values())
    others = {module: {"bits": own, "group_size": GROUP_SIZE} for module, own in bits.items() if own != usual}
    return {"bits": usual, "group_size": GROUP_SIZE, "mode": "affine"} | others


def model_config(metadata: Metadata, bits: dict[str, int]) -> dict[str, Any]:
    quantization = {"quantization": quantization_config(bits)} if bits else {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": _integer(metadata, "tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
        "eos_token_id": _integer(metadata, "tokenizer.ggml.eos_token_id"),
        "head_dim": _integer(metadata, "llama.rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": _integer(metadata, "llama.embedding_length"),
        "intermediate_size": _integer(metadata, "llama.feed_forward_length"),
        "max_position_embeddings": _integer(metadata, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": _integer(metadata, "llama.attention.head_count"),
        "num_hidden_layers": _integer(metadata, "llama.block_count"),
        "num_key_value_heads": _integer(metadata, "llama.attention.head_count_kv"),
        "pad_token_id": _integer(metadata, "tokenizer.ggml.padding_token_id"),
        # 1e-5 in the file is a float32, of which seven decimal digits are exact.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon'].item():.7g}"),
        "rope_theta": metadata["llama.rope.freq_base"].item(),
        "tie_word_embeddings": True,  # the file has no output matrix
        "vocab_size": _integer(metadata, "llama.vocab_size"),
    } | quantization


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """Return the generation settings. The end of a document is an end token too, because it ends raw text."""
    end_of_document = metadata["tokenizer.ggml.tokens"].index("<|endoftext|>")
    return {
        "bos_token_id": _integer(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": [_integer(metadata, "tokenizer.ggml.eos_token_id"), end_of_document],
        "pad_token_id": _integer(metadata, "tokenizer.ggml.padding_token_id"),
        **SAMPLING,
    }


# --- tokenizer ---------------------------------------------------------------------------------------


def make_tokenizer(metadata: Metadata) -> Tokenizer:
    """Return the byte-level BPE tokenizer. The pre-tokenizer that GGUF calls `smollm` splits at each digit
    (`\\p{N}`), then by the pattern of GPT-2, which is that of `ByteLevel`."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special_tokens(metadata)]
    )
    return tokenizer


def special_tokens(metadata: Metadata) -> list[str]:
    types = metadata["tokenizer.ggml.token_type"].tolist()
    tokens = metadata["tokenizer.ggml.tokens"]
    return [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: _integer(metadata, f"tokenizer.ggml.{role}_token_id") for name, role in roles.items()}
    return {name: tokens[number] for name, number in ids.items()} | {
        "add_bos_token": bool(metadata["tokenizer.ggml.add_bos_token"]),
        "add_prefix_space": bool(metadata["tokenizer.ggml.add_space_prefix"]),
        "additional_special_tokens": special_tokens(metadata),
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": _integer(metadata, "llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _integer(metadata: Metadata, key: str) -> int:
    return int(metadata[key].item())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
