"""Networks that guess one token after the other by a model's hidden states, as mlx-vlm builds them.

Upstream's modules do the work, and its rounds do not come into it. Both kinds are fed a token with what was
thought of the one before it, and guess on by what they have thought themselves.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from worker.engine.caches.batch import RowCaches
from worker.engine.trees import arrays_of


class Prediction:
    """Multi-token prediction: layers that come with a model's weights (Qwen3.5's `mtp.*`, for one). By hidden
    states as the output layer gets them, at whose positions their tokens stand."""

    keeps = True

    def __init__(self, module: Any, model: nn.Module) -> None:
        """`module`: a `Qwen3_5MTPDraftModel`. `model`: whose embedding and output layer it uses."""
        self._module = module.bind(model)
        attention = module.layers[0].self_attn
        self.cache_values = 2 * attention.num_key_value_heads * attention.head_dim * len(module.layers)

    def arrays(self) -> list[mx.array]:
        """Of all weights that are used, the model's own among them."""
        bound = (self._module, self._module._input_embed, self._module._lm_head_fn)
        modules = [module for module in bound if isinstance(module, nn.Module)]
        return [array for module in modules for array in arrays_of(module.parameters()).values()]

    def fresh(self) -> RowCaches:
        """See `heads.Layers`."""
        return [KVCache() for _ in self._module.layers]

    def think(
        self, tokens: mx.array, before: mx.array | None, positions: mx.array, caches: list[Any]
    ) -> mx.array:
        """See `guessing.Reader`."""
        assert before is not None, "somebody has thought before"
        embedded = self._module._input_embed(tokens) * self._module._input_embed_scale
        thought: mx.array = self._module._forward_hidden(embedded, before, caches, positions)
        return thought

    def speak(self, thought: mx.array) -> mx.array:
        """See `guessing.Network`."""
        token: mx.array = self._module._greedy_token(thought)
        return token


class Eagle:
    """EAGLE-3 (arXiv 2503.01840): a layer or a few, trained for one model, by the hidden states of three of
    its layers; with a vocabulary of its own, if that is smaller."""

    keeps = False
    """What was thought of a guess is replaced by what the model thinks of it, as upstream does."""

    def __init__(self, module: Any, model: nn.Module) -> None:
        """`module`: an `Eagle3DraftModel`. `model`: whose embedding it uses, if its own is as large."""
        self._module = module.bind(model)
        attention = module.layers[0].self_attn
        self.cache_values = 2 * attention.n_kv_heads * attention.head_dim * len(module.layers)

    def fresh(self) -> RowCaches:
        """See `heads.Layers`."""
        return [KVCache() for _ in self._module.layers]

    def think(
        self, tokens: mx.array, before: mx.array | None, positions: mx.array, caches: list[Any]
    ) -> mx.array:
        """See `guessing.Reader`. What is fed stands one position further: a token is at its own."""
        assert before is not None, "somebody has thought before"
        # Upstream keeps these two in the module, for the one batch that it has.
        self._module._cache, self._module._next_position = caches, positions[:, 0] + 1
        thought: mx.array = self._module._forward_tokens(tokens, before, mx.uint32)
        self._module._cache, self._module._next_position = [], 1
        return thought

    def speak(self, thought: mx.array) -> mx.array:
        """See `guessing.Network`."""
        logits = self._module._logits(thought)
        token: mx.array = self._module._sample(logits, None, mx.uint32, True)
        return token
