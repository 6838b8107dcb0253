"""Random weights of a model that neither repeats itself nor stops, and whose output depends on its prompt.

Drawn uniformly, never normally. Integers scaled by one multiplication are bit-identical on every processor; a
normal draw uses a logarithm, which is not.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.utils import quantize_model
from tokenizers import Tokenizer

from tests.models.arrays import named_parameters
from tests.models.configs import VOCABULARY
from tests.models.tokenizer import ADDED_TOKENS, token_bytes

_LOUD = 1.0
_FRAGMENT = 0.7
_QUIET = 0.1
# Attention scores with standard deviation 3: each head attends to a few places instead of averaging all.
_QUERY_KEY_NORM = 1.7

# Names of the same parameters in upstream's models.
_EMBEDDINGS = (
    "embed_tokens", "embedding", "embeddings", "word_embeddings", "tok_embeddings", "token_embeddings",
    "embed_in", "embed", "wte",
)  # fmt: skip
_HEADS = (
    "lm_head.weight", "lm_head.linear.weight", "lm_head", "lm_head.output_embeddings", "embed_out.weight",
    "model.ff_out.weight", "output.weight",
)  # fmt: skip
_FINAL_NORMS = ("model.norm", "norm_f", "final_layernorm", "final_norm", "embedding_norm", "output_norm")
_OUTLETS = (
    "o_proj", "out_proj", "down_proj", "linear_out", "output_linear", "fc2", "o_b_proj", "w2", "value",
)  # fmt: skip


@dataclass(frozen=True)
class Scales:
    """Scale of each part. Logits have a standard deviation of about 4 and a median gap of 0.8.

    Where the output layer is tied to the embedding, a token's embedding must be small beside what the layers
    add. Otherwise the most probable next token is the last one.
    """

    embedding: float
    final_norm: float
    branch: float
    """Gain of the projections by which a layer adds to the residual stream."""
    norm_offset: float = 0.0
    """Offset that the architecture itself adds to a norm's weight."""
    head: float = 0.5
    query: float = 1.0
    """Gain of the queries, for attention without a norm that sets the width of its scores."""


SCALES = {
    "qwen3": Scales(embedding=1.0, final_norm=1.0, branch=2.0),
    "qwen3_5": Scales(embedding=0.1, final_norm=5.0, branch=2.0),
    "gemma3_text": Scales(embedding=0.02, final_norm=25.0, branch=1.0, norm_offset=1.0),
    "gemma3n": Scales(embedding=0.02, final_norm=25.0, branch=1.0),
    "gemma4_text": Scales(embedding=0.02, final_norm=25.0, branch=1.0),
    "recurrent_gemma": Scales(embedding=0.02, final_norm=25.0, branch=1.0, norm_offset=1.0, query=3.0),
    # Loading normalizes every row of the output layer to length one.
    "baichuan_m1": Scales(embedding=1.0, final_norm=4.0, branch=2.0, query=3.0),
}
UNTIED = Scales(embedding=1.0, final_norm=1.0, branch=2.0, query=3.0)
_TIED = Scales(embedding=0.1, final_norm=5.0, branch=2.0, query=3.0)


def new_model(config: dict[str, Any]) -> Any:
    """Return mlx-lm's model for `config`, with the weights of its own constructor."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    # Upstream's argument classes modify the dictionaries passed to them.
    return module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))


def quantized(config: dict[str, Any], weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the parameters of the model as upstream quantizes it under `config["quantization"]`."""
    model = new_model(config)
    model.load_weights(list(weights.items()))
    model, _ = quantize_model(model, {}, **config["quantization"])
    return dict(named_parameters(model))


def draw_weights(
    config: dict[str, Any],
    tokenizer: Tokenizer,
    seed: int,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, mx.array]:
    """Return every parameter of the model by name, float32, ready to be saved.

    `shapes`: parameter shapes; None: those of mlx-lm's model. Deterministic in `seed`, independent of the
    global random state.
    """
    shapes = shapes or {name: array.shape for name, array in named_parameters(new_model(config))}
    if config["tie_word_embeddings"]:
        # Gemma 3's constructor makes an output layer that loading drops again.
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith("lm_head.weight")}
    output = _output_of(shapes)
    scales = SCALES.get(config["model_type"], UNTIED if output.endswith(_HEADS) else _TIED)
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(seed), len(shapes))
        weights = {
            name: draw(name, shapes[name], key, scales)
            for name, key in zip(sorted(shapes), keys, strict=True)
        }
        for record in config.get("modules", ()):
            weights |= _packed(f"language_model.{record['path']}", record["block"], weights, config)
        weights[output] *= mx.array(loudness(tokenizer, weights[output].shape[0]))[:, None]
        mx.eval(weights)
    return weights


def _packed(
    name: str, block: int, weights: Mapping[str, mx.array], config: dict[str, Any]
) -> dict[str, mx.array]:
    """Return a two-bit layer behind a Hadamard rotation. Random signs keep the weights random."""
    rows, words = weights[f"{name}.weight"].shape
    width = words * 16
    plain = mx.random.uniform(-1, 1, (rows, width), key=mx.random.key(block)) * _spread(1 / math.sqrt(width))
    sizes = {key: config["quantization"][key] for key in ("bits", "group_size")}
    weight, scales, biases = mx.quantize(plain.astype(mx.float16), **sizes)
    signs = mx.where(mx.arange(width) % 3 == 0, -1.0, 1.0)
    parts = {"weight": weight, "scales": scales, "biases": biases, "signs": signs}
    return {f"{name}.{part}": array for part, array in parts.items()}


def loudness(tokenizer: Tokenizer, rows: int) -> list[float]:
    """Return one factor per row of the output layer that makes the text of a random model readable.

    Whole visible text gets a large factor. Parts of a character get a smaller one, so that they occur without
    filling the text with replacement characters. Added tokens, control characters and ids without text are
    almost never sampled.
    """
    factors = [_loudness_of(piece) for piece in token_bytes(tokenizer)]
    return factors + [_QUIET] * (rows - len(factors))


def _loudness_of(piece: bytes) -> float:
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return _FRAGMENT
    if text in ADDED_TOKENS:
        return _QUIET
    visible = all(character.isprintable() or character in "\n\u200d" for character in text)
    return _LOUD if visible else _QUIET


def _output_of(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name of the output layer, or of the embedding where the two are tied."""
    embeddings = tuple(f"{name}.weight" for name in _EMBEDDINGS)
    large = [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] >= VOCABULARY]
    return next(name for ends in (_HEADS, embeddings) for name in large if name.endswith(ends))


def draw(name: str, shape: tuple[int, ...], key: mx.array, scales: Scales) -> mx.array:
    """Draw one parameter around a mean. `spread` is half the width of the uniform distribution."""
    mean, spread = _distribution(name.split("."), shape, scales)
    return mean + spread * (2.0 * mx.random.uniform(shape=shape, key=key) - 1.0)


def _distribution(name: list[str], shape: tuple[int, ...], scales: Scales) -> tuple[float, float]:
    match name:
        case [*_, "A_log"]:
            return -1.5, 1.5
        case [*_, "dt_bias"] | [*_, "dt_proj", "bias"] | [*_, "w_lora", "lora", _, "bias"]:
            # Together with A_log: states that decay over three to a thousand tokens. Upstream's own initial
            # values decay within one.
            return -2.5, 1.5
        case [*_, "recurrent_param"]:
            return -4.0, 1.5
        case [*_, "conv1d" | "conv_1d" | "conv", _] | [*_, "conv_k" | "conv_v"]:
            return 0.0, _spread(0.5)
        case [*_, "bias"]:
            return 0.0, 0.1
        case [*_, "weight"] if ".".join(name[:-1]).endswith(_FINAL_NORMS):
            return scales.final_norm - scales.norm_offset, 0.1 * scales.final_norm
        case [*_, "q_norm" | "k_norm", _]:
            return _QUERY_KEY_NORM - scales.norm_offset, 0.2
        case _ if len(shape) <= 1 or (len(name) > 1 and name[-2].endswith("norm")):
            return 1.0 - scales.norm_offset, 0.1
        case [_]:
            return 0.0, 0.2
        case _:
            return 0.0, _spread(_deviation(name, shape, scales))


def _deviation(name: list[str], shape: tuple[int, ...], scales: Scales) -> float:
    if ".".join(name).endswith(_HEADS):
        return scales.head
    if name[-2] in _EMBEDDINGS:
        return scales.embedding
    if name[-2] in ("q_proj", "q_b_proj"):
        return scales.query / math.sqrt(shape[-1])
    if name[-2] in _OUTLETS:
        return scales.branch / math.sqrt(shape[-1])
    return 1 / math.sqrt(shape[-1])


def _spread(deviation: float) -> float:
    return math.sqrt(3) * deviation
