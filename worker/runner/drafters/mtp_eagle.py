"""MTP and EAGLE-3: autoregressive drafters that read a target's hidden states, on mlx-vlm's modules.

Upstream's modules are used without its decoding loop. Both kinds are fed a token with the hidden state of the
token before it: the target's first, then their own.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from worker.runner.kv.batch import RowCaches
from worker.runner.trees import arrays_of


class MtpDraft:
    """Multi-token prediction: layers that ship with a model's weights (Qwen3.5's `mtp.*`, for one). They read
    the hidden states that the output layer gets, at the positions of their tokens."""

    keeps_draft_kv = True

    def __init__(self, module: Any, model: nn.Module) -> None:
        """`module`: a `Qwen3_5MTPDraftModel`. `model`: provides the embedding and the output layer."""
        self._module = module.bind(model)
        attention = module.layers[0].self_attn
        self.cache_values = 2 * attention.num_key_value_heads * attention.head_dim * len(module.layers)

    def arrays(self) -> list[mx.array]:
        """Return all weights in use, the model's shared ones included."""
        bound = (self._module, self._module._input_embed, self._module._lm_head_fn)
        modules = [module for module in bound if isinstance(module, nn.Module)]
        return [array for module in modules for array in arrays_of(module.parameters()).values()]

    def fresh(self) -> RowCaches:
        return [KVCache() for _ in self._module.layers]

    def forward(
        self, tokens: mx.array, before: mx.array | None, positions: mx.array, caches: list[Any]
    ) -> mx.array:
        assert before is not None, "hidden states are required"
        embedded = self._module._input_embed(tokens) * self._module._input_embed_scale
        hidden: mx.array = self._module._forward_hidden(embedded, before, caches, positions)
        return hidden

    def greedy_token(self, hidden: mx.array) -> mx.array:
        token: mx.array = self._module._greedy_token(hidden)
        return token


class EagleDraft:
    """EAGLE-3 (arXiv 2503.01840): one layer or a few, trained for one model, on the hidden states of three of
    its layers; possibly with a smaller vocabulary of its own."""

    keeps_draft_kv = False
    """Hidden states of draft tokens are replaced by the target's, as upstream does."""

    def __init__(self, module: Any, model: nn.Module) -> None:
        """`module`: an `Eagle3DraftModel`. `model`: provides the embedding, if the module's own is as
        large."""
        self._module = module.bind(model)
        attention = module.layers[0].self_attn
        self.cache_values = 2 * attention.n_kv_heads * attention.head_dim * len(module.layers)

    def fresh(self) -> RowCaches:
        return [KVCache() for _ in self._module.layers]

    def forward(
        self, tokens: mx.array, before: mx.array | None, positions: mx.array, caches: list[Any]
    ) -> mx.array:
        """Run the layers one position further: they place a hidden state at the position of its next
        token."""
        assert before is not None, "hidden states are required"
        # Upstream keeps these two in the module, for its only batch.
        self._module._cache, self._module._next_position = caches, positions[:, 0] + 1
        hidden: mx.array = self._module._forward_tokens(tokens, before, mx.uint32)
        self._module._cache, self._module._next_position = [], 1
        return hidden

    def greedy_token(self, hidden: mx.array) -> mx.array:
        logits = self._module._logits(hidden)
        token: mx.array = self._module._sample(logits, None, mx.uint32, True)
        return token
