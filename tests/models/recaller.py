"""A tiny model that recalls facts anywhere in a long prompt, constructed without training.

Its weights form an induction circuit (arXiv 2209.11895) in the layers of LFM2, as upstream's loader reads
them. A short convolution gives each token the two tokens before it; an attention head finds an earlier
occurrence of the last two tokens and returns the token that followed. Names and words are random vectors.
Beside the circuit is an idle head with random weights, which attends anywhere and adds a little: a score
must separate it from the circuit. The RoPE turns so slowly that it has no effect, except in the head
dimensions that the circuit does not use.
"""

from __future__ import annotations

import json
import math
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
WIDTH = 24
"""Of a token's vector."""
IDLE, LAYERS = 1, 2
"""Idle heads of each layer, and layers with attention; all heads behind the first one are idle."""
HIDDEN = HEAD * (1 + IDLE)
SHARPNESS, SURETY = 60.0, 24.0
"""Attention score of a match, and the logit of the token found."""
NOISE, IDLE_SHARP = 0.2, 0.5
"""Output of an idle head relative to the circuit's, and how sharply it attends."""


def make_recaller(folder: Path, seed: int) -> Path:
    """Write a model folder without a tokenizer, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    weights = {name: mx.array(value.astype(np.float32)) for name, value in _Circuit(seed).weights()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


CONFIG: dict[str, Any] = {
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "vocab_size": SIZE,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1 + LAYERS,
    "num_attention_heads": 1 + IDLE,
    "num_key_value_heads": 1 + IDLE,
    "max_position_embeddings": _CONTEXT,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": HIDDEN,
    "block_ff_dim": NEURONS,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "rope_theta": _ROPE,
    "layer_types": ["conv"] + ["full_attention"] * LAYERS,
    "tie_word_embeddings": True,
}


class _Circuit:
    """The parts of the hidden state (a constant 1, the token, the one before, the one before that), and the
    matrices that move them."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        width = WIDTH
        self._itself, self._before, self._second = (
            slice(1 + at * width, 1 + (at + 1) * width) for at in range(3)
        )

    def weights(self) -> list[tuple[str, Matrix]]:
        """Return the weights by upstream's names."""
        hidden = HIDDEN
        named = [("model.embed_tokens.weight", self._tokens())]
        named += self._layer(0, {**self._convolution()})
        for layer in range(1, 1 + LAYERS):
            named += self._layer(layer, self._attention(has_circuit=layer == 1))
        # After the circuit a token's own part is the original plus four times the token found.
        loudness = self._length(1 + WIDTH * (1 + 16 + 2)) / (4 * WIDTH)
        return [*named, ("model.embedding_norm.weight", np.full(hidden, SURETY * loudness))]

    def _length(self, squares: float) -> float:
        """Return the divisor of the norm."""
        return math.sqrt(squares / HIDDEN)

    def _tokens(self) -> Matrix:
        width = WIDTH
        own = self._draw.standard_normal((SIZE, width))
        own[:, : len(MARKS)] = 0
        for dimension, mark in enumerate(MARKS):
            own[mark] = np.eye(width)[dimension]
        own *= math.sqrt(width) / np.linalg.norm(own, axis=1, keepdims=True)
        tokens = np.zeros((SIZE, HIDDEN))
        tokens[:, 0], tokens[:, self._itself] = 1, own
        return tokens

    def _layer(self, number: int, parts: dict[str, Matrix]) -> list[tuple[str, Matrix]]:
        hidden, small = HIDDEN, 0.02
        rest = {
            "operator_norm.weight": np.ones(hidden),
            "ffn_norm.weight": np.ones(hidden),
            "feed_forward.w1.weight": small * self._draw.standard_normal((NEURONS, hidden)),
            "feed_forward.w3.weight": small * self._draw.standard_normal((NEURONS, hidden)),
            "feed_forward.w2.weight": small * self._draw.standard_normal((hidden, NEURONS)),
        }
        return [(f"model.layers.{number}.{name}", value) for name, value in (parts | rest).items()]

    def _convolution(self) -> dict[str, Matrix]:
        hidden, width = HIDDEN, WIDTH
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
            width = WIDTH
            values[:HEAD] = 0
            values[:width, self._itself] = np.eye(width)
            out[:, :HEAD] = 0
            out[self._itself, :width] = 4 * self._length(1 + 3 * width) * np.eye(width)
        gain = math.sqrt(SHARPNESS / math.sqrt(HEAD))
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
        hidden = HIDDEN
        queries, keys, values, out = (
            self._draw.standard_normal((hidden, hidden)) / math.sqrt(hidden) for _ in range(4)
        )
        for head in range(0, hidden, HEAD):
            sharp = self._draw.uniform(0.1, 1.0) * IDLE_SHARP
            queries[head : head + HEAD] *= sharp
            # The rest of the length goes where all keys are zero, so it attends nowhere.
            queries[head, 0] += math.sqrt(1 - sharp**2) * math.sqrt(HEAD) * self._length(1 + 3 * WIDTH)
            keys[head] = 0
        return queries, keys, values, out * NOISE * 4 * math.sqrt(WIDTH / HEAD)

    def _look(self, queries: Matrix, keys: Matrix) -> None:
        """Set the head that finds an earlier occurrence of the last two tokens. LEAD is treated like TELL."""
        width = WIDTH
        queries[:HEAD], keys[:HEAD] = 0, 0
        first, second = (slice(start, start + width) for start in (UNUSED, HEAD // 2 + UNUSED))
        queries[first, self._before] = np.eye(width)
        queries[UNUSED : UNUSED + 2, self._before][:, :2] = [[1, 1], [0, 0]]
        queries[second, self._itself] = np.eye(width)
        keys[first, self._second] = np.eye(width)
        keys[second, self._before] = np.eye(width)
