"""A tiny model with multi-token-prediction (MTP) layers, some of whose draft tokens are accepted.

The mixing layer is fitted to the model's own greedy output for a few prompts. The rest is random and small,
so that enough draft tokens are accepted for tests.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.models.arrays import load_arrays
from tests.models.fixtures import model_folder

HEADS = "hybrid_heads"
UNTIED = "hybrid_heads_untied"
"""Name of the variant with an untied output layer."""
PROMPTS = tuple(tuple((37 * prompt + 11 * place) % 1900 for place in range(20)) for prompt in range(6))
ANSWER_TOKENS = 40
_RIDGE = 1e-3
_FAINT = 0.05


def make_heads(folder: Path) -> Path:
    """Write the hybrid model with one MTP layer into `folder`, made if absent."""
    shutil.copytree(model_folder("hybrid"), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text["mtp_num_hidden_layers"] = 1
    text["rope_parameters"]["mrope_section"] = [3, 3, 2]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    network, _ = load_model(folder)
    _add(folder, text, _fitted(network))
    return folder


def make_untied(folder: Path) -> Path:
    """Write the untied variant into `folder`, made if absent."""
    shutil.copytree(model_folder(HEADS), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = load_arrays(folder / "model.safetensors")
    weights["language_model.lm_head.weight"] = weights["language_model.model.embed_tokens.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def make_unfitted_heads(folder: Path) -> None:
    """Add an MTP layer of random weights to the Qwen3.5 in `folder`."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    size = text["hidden_size"]
    _add(folder, text, _FAINT * mx.random.normal((size, 2 * size), key=mx.random.key(6)))


def _add(folder: Path, text: dict[str, Any], mixing: mx.array) -> None:
    weights = load_arrays(folder / "model.safetensors")
    heads = {f"mtp.{name}": array for name, array in _weights(text, mixing).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights | heads, metadata={"format": "mlx"})


def answer_of(network: Any, prompt: tuple[int, ...], tokens: int = ANSWER_TOKENS) -> list[int]:
    """Return the prompt followed by the model's greedy output."""
    said, unread, caches = list(prompt), list(prompt), make_prompt_cache(network)
    for _ in range(tokens):
        unread = [int(np.array(mx.argmax(network(mx.array([unread]), cache=caches)[0, -1])))]
        said += unread
    return said


def hidden_of(network: Any, tokens: list[int]) -> mx.array:
    """Return the hidden states of `tokens`, [1, tokens, width]."""
    hidden: mx.array = network.language_model.model(mx.array([tokens]))
    return hidden


def _weights(text: dict[str, Any], mixing: mx.array) -> dict[str, mx.array]:
    size, heads, groups = text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]
    each, inner = text["head_dim"], text["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (2 * heads * each, size),
        "self_attn.k_proj": (groups * each, size),
        "self_attn.v_proj": (groups * each, size),
        "self_attn.o_proj": (size, heads * each),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    keys = mx.random.split(mx.random.key(5), len(shapes))
    weights = {
        f"layers.0.{name}.weight": _FAINT * mx.random.normal(shape, key=key)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    layers = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    weights |= {f"{name}.weight": mx.ones(size) for name in (*norms, *layers)}
    weights |= {f"layers.0.self_attn.{name}_norm.weight": mx.ones(each) for name in "qk"}
    return weights | {"fc.weight": mixing}


def _fitted(network: Any) -> mx.array:
    """Fit the map from a token and the hidden state before it to the embedding of the next token."""
    embedding = np.array(network.language_model.model.embed_tokens.weight)
    given, wanted = [], []
    for prompt in PROMPTS:
        said = answer_of(network, prompt)
        hidden = np.array(hidden_of(network, said))[0]
        given.append(np.concatenate([_normed(embedding[said[1:-1]]), _normed(hidden[:-2])], axis=1))
        wanted.append(_normed(embedding[said[2:]]))
    inputs, outputs = np.concatenate(given), np.concatenate(wanted)
    square = inputs.T @ inputs + _RIDGE * len(inputs) * np.eye(inputs.shape[1])
    return mx.array(np.linalg.solve(square, inputs.T @ outputs).T.astype(np.float32))


def _normed(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + 1e-6)
