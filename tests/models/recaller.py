"""A tiny model that recalls facts anywhere in a prompt of 16,000 tokens, constructed without training.

Its weights form an induction circuit (arXiv 2209.11895) in the layers of LFM2, as upstream's loader reads
them. A short convolution gives each token the two tokens before it; an attention head finds an earlier
occurrence of the last two tokens and returns the token that followed. Names and words are random vectors;
their width determines how well and how confidently they are distinguished. Beside the circuit are idle heads
with random weights, which attend anywhere and add a little of it: a method that chooses by attention must
separate them from the circuit. The RoPE turns so slowly that it has no effect, except in the head dimensions
that the circuit does not use.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.models.facts import END, LEAD, SIZE, TELL

Matrix = NDArray[np.float64]

HEAD = 64
UNUSED = 8
"""The first pairs of a head's dimensions, which the RoPE turns."""
NEURONS = 32
MARKS = (TELL, LEAD, END)
_CONTEXT, _ROPE = 32_768, 1e30


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. `width`: of a token's vector, at most 24. `idle`: heads beside the circuit, in
    each layer. `layers`: attention layers; all heads behind the first layer are idle. `sharpness`:
    attention score of a match. `surety`: logit of the token found. `noise`: output of an idle head
    relative to the circuit's."""

    width: int = 24
    idle: int = 1
    layers: int = 2
    sharpness: float = 60.0
    surety: float = 24.0
    noise: float = 0.2
    idle_sharp: float = 0.5

    @property
    def hidden(self) -> int:
        return HEAD * (1 + self.idle)


LARGE, SMALL = Shape(), Shape(width=20, idle=0, layers=1)
"""The model that answers, and the smaller one that scores its prompts."""


def make_recaller(folder: Path, shape: Shape, seed: int) -> Path:
    """Write a model folder without a tokenizer, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=2), encoding="utf-8")
    weights = {name: mx.array(value.astype(np.float32)) for name, value in _Circuit(shape, seed).weights()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "vocab_size": SIZE,
        "hidden_size": shape.hidden,
        "num_hidden_layers": 1 + shape.layers,
        "num_attention_heads": 1 + shape.idle,
        "num_key_value_heads": 1 + shape.idle,
        "max_position_embeddings": _CONTEXT,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": shape.hidden,
        "block_ff_dim": NEURONS,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "rope_theta": _ROPE,
        "layer_types": ["conv"] + ["full_attention"] * shape.layers,
        "tie_word_embeddings": True,
    }


class _Circuit:
    """The parts of the hidden state (a constant 1, the token, the one before, the one before that), and the
    matrices that move them."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._draw = np.random.default_rng(seed)
        width = shape.width
        self._itself, self._before, self._second = (
            slice(1 + at * width, 1 + (at + 1) * width) for at in range(3)
        )

    def weights(self) -> list[tuple[str, Matrix]]:
        """Return the weights by upstream's names."""
        hidden = self._shape.hidden
        named = [("model.embed_tokens.weight", self._tokens())]
        named += self._layer(0, {**self._convolution()})
        for layer in range(1, 1 + self._shape.layers):
            named += self._layer(layer, self._attention(has_circuit=layer == 1))
        # After the circuit a token's own part is the original plus four times the token found.
        loudness = self._length(1 + self._shape.width * (1 + 16 + 2)) / (4 * self._shape.width)
        return [*named, ("model.embedding_norm.weight", np.full(hidden, self._shape.surety * loudness))]

    def _length(self, squares: float) -> float:
        """Return the divisor of the norm."""
        return math.sqrt(squares / self._shape.hidden)

    def _tokens(self) -> Matrix:
        width = self._shape.width
        own = self._draw.standard_normal((SIZE, width))
        own[:, : len(MARKS)] = 0
        for dimension, mark in enumerate(MARKS):
            own[mark] = np.eye(width)[dimension]
        own *= math.sqrt(width) / np.linalg.norm(own, axis=1, keepdims=True)
        tokens = np.zeros((SIZE, self._shape.hidden))
        tokens[:, 0], tokens[:, self._itself] = 1, own
        return tokens

    def _layer(self, number: int, parts: dict[str, Matrix]) -> list[tuple[str, Matrix]]:
        hidden, small = self._shape.hidden, 0.02
        rest = {
            "operator_norm.weight": np.ones(hidden),
            "ffn_norm.weight": np.ones(hidden),
            "feed_forward.w1.weight": small * self._draw.standard_normal((NEURONS, hidden)),
            "feed_forward.w3.weight": small * self._draw.standard_normal((NEURONS, hidden)),
            "feed_forward.w2.weight": small * self._draw.standard_normal((hidden, NEURONS)),
        }
        return [(f"model.layers.{number}.{name}", value) for name, value in (parts | rest).items()]

    def _convolution(self) -> dict[str, Matrix]:
        hidden, width = self._shape.hidden, self._shape.width
        gate_in, gate_out, carried = (np.zeros((hidden, hidden)) for _ in range(3))
        taps = np.zeros((hidden, 3, 1))
        for place, tap in ((self._before, 1), (self._second, 0)):
            gate_in[place, 0] = 1
            gate_out[place, 0] = self._length(1 + width) ** 3
            carried[place, self._itself] = np.eye(width)
            taps[place, tap] = 1
        joint = np.concatenate([gate_in, gate_out, carried])
        return {
            "conv.in_proj.weight": joint,
            "conv.conv.weight": taps,
            "conv.out_proj.weight": np.eye(hidden),
        }

    def _attention(self, *, has_circuit: bool) -> dict[str, Matrix]:
        queries, keys, values, out = self._idle()
        if has_circuit:
            self._look(queries, keys)
            width = self._shape.width
            values[:HEAD] = 0
            values[:width, self._itself] = np.eye(width)
            out[:, :HEAD] = 0
            out[self._itself, :width] = 4 * self._length(1 + 3 * width) * np.eye(width)
        gain = math.sqrt(self._shape.sharpness / math.sqrt(HEAD))
        return {
            "self_attn.q_proj.weight": queries,
            "self_attn.k_proj.weight": keys,
            "self_attn.v_proj.weight": values,
            "self_attn.out_proj.weight": out,
            "self_attn.q_layernorm.weight": np.full(HEAD, gain),
            "self_attn.k_layernorm.weight": np.full(HEAD, gain),
        }

    def _idle(self) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """Return heads that attend to random positions, sharply or broadly."""
        hidden = self._shape.hidden
        queries, keys, values, out = (
            self._draw.standard_normal((hidden, hidden)) / math.sqrt(hidden) for _ in range(4)
        )
        for head in range(0, hidden, HEAD):
            sharp = self._draw.uniform(0.1, 1.0) * self._shape.idle_sharp
            queries[head : head + HEAD] *= sharp
            # The rest of the length goes where all keys are zero, so it attends nowhere.
            queries[head, 0] += (
                math.sqrt(1 - sharp**2) * math.sqrt(HEAD) * self._length(1 + 3 * self._shape.width)
            )
            keys[head] = 0
        return queries, keys, values, out * self._shape.noise * 4 * math.sqrt(self._shape.width / HEAD)

    def _look(self, queries: Matrix, keys: Matrix) -> None:
        """Set the head that finds an earlier occurrence of the last two tokens. LEAD is treated like TELL."""
        width = self._shape.width
        queries[:HEAD], keys[:HEAD] = 0, 0
        first, second = (slice(start, start + width) for start in (UNUSED, HEAD // 2 + UNUSED))
        queries[first, self._before] = np.eye(width)
        queries[UNUSED : UNUSED + 2, self._before][:, :2] = [[1, 1], [0, 0]]
        queries[second, self._itself] = np.eye(width)
        keys[first, self._second] = np.eye(width)
        keys[second, self._before] = np.eye(width)
