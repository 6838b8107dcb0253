"""DFlash block drafting (arXiv 2602.06036) on mlx-vlm's modules: a block of draft tokens in one pass.

The draft layers' KV caches hold projections of the target model's hidden states, one per token. The block, a
row's last token and mask tokens behind it, attends to those and to itself, and is not cached. Upstream's
attention has one offset and no mask, for a single row. `BlockAttention` replaces it in each layer, with its
weights, for rows of unequal lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_vlm.speculative.drafters import DFlashDraftModel

from worker.runner.drafters.draft_network import DraftInput
from worker.runner.kv.batch import RowCaches


@dataclass(frozen=True, slots=True)
class BlockContext:
    """What the block attends to in one layer: `cache`, of one row or of a batch. `columns`, `starts`: column
    and position where the new context begins; `counts`: its length, [rows] each. `window`: attend to the last
    `window` tokens only; None: to all."""

    cache: Any
    columns: mx.array
    starts: mx.array
    counts: mx.array
    window: int | None = None

    def mask(self, columns: int, block: int, window: int | None, *, is_causal: bool) -> mx.array:
        """Return the attention mask, [rows, 1, block, columns + block] bool. `window`: of a sliding-window
        layer."""
        ends = (self.columns + self.counts)[:, None, None, None]
        asking, places = mx.arange(block)[:, None], mx.arange(columns)
        seen = mx.broadcast_to(places < ends, (ends.shape[0], 1, block, columns))
        own = asking >= mx.arange(block) if is_causal else mx.ones((block, block), mx.bool_)
        if window is not None and is_causal:
            seen = seen & (places > ends + asking - window)
            own = own & (mx.arange(block) > asking - window)
        elif window is not None:
            seen = seen & (places > ends - window)
        if self.window is not None:
            seen = seen & (places >= ends - self.window)
        return mx.concatenate([seen, mx.broadcast_to(own, (*seen.shape[:3], block))], axis=-1)


class BlockAttention(nn.Module):
    """Replacement of `DFlashAttention` for rows of unequal lengths."""

    def __init__(self, module: Any) -> None:
        initialize: Any = super().__init__  # MLX leaves it untyped
        initialize()
        self.module = module
        self.k_proj, self.v_proj = module.k_proj, module.v_proj  # upstream's network accesses them

    def __call__(
        self, x: mx.array, x_ctx: mx.array, rope: Any, cache: BlockContext, projected_context: Any = None
    ) -> mx.array:
        """Attention of a block `x`, [rows, tokens, width], behind the context `x_ctx`, [rows, fed, width],
        which is written to the cache."""
        own, ends = self.module, cache.starts + cache.counts
        fed = own._project_kv(x_ctx) if projected_context is None else projected_context
        keys, values = cache.cache.update_and_fetch(*self._placed(fed, rope, cache.starts))
        block_keys, block_values = self._placed(own._project_kv(x), rope, ends)
        mask = cache.mask(keys.shape[2], x.shape[1], own.sliding_window, is_causal=own.is_causal)
        found = mx.fast.scaled_dot_product_attention(
            rope(own.q_norm(self._split(own.q_proj(x), own.n_heads)).transpose(0, 2, 1, 3), offset=ends),
            mx.concatenate([keys, block_keys], axis=2),
            mx.concatenate([values, block_values], axis=2),
            scale=own.scale,
            mask=mask,
            sinks=own.attention_sink_bias,
        )
        said: mx.array = own.o_proj(found.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))
        return said

    def _placed(self, projected: Any, rope: Any, first: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values, [rows, heads, tokens, width], rotated from the positions `first` on."""
        (keys, values), heads = projected, self.module.n_kv_heads
        normed = self.module.k_norm(self._split(keys, heads)).transpose(0, 2, 1, 3)
        return rope(normed, offset=first), self._split(values, heads).transpose(0, 2, 1, 3)

    def _split(self, flat: mx.array, heads: int) -> mx.array:
        return flat.reshape(*flat.shape[:2], heads, -1)


class DFlashDraft:
    """`BlockDraft` on a `DFlashDraftModel`."""

    def __init__(self, module: Any, model: nn.Module) -> None:
        """`model`: provides the embedding and the output layer. Raises `AttributeError` where these are not
        found."""
        # The model attributes that subclasses require beyond this serve upstream's decoding loop only.
        self._module: Any = DFlashDraftModel.bind(module, model)
        for layer in module.layers:
            layer.self_attn = BlockAttention(layer.self_attn)
        config = module.config
        self.block = int(config.block_size) - 1
        self._window: int | None = config.draft_window_size or None
        self.cache_values = 2 * config.num_key_value_heads * config.head_dim * len(module.layers)

    def fresh(self) -> RowCaches:
        """Return caches of full length; sliding windows do not shorten them."""
        return [KVCache() for _ in self._module.layers]

    def forward(
        self, tokens: mx.array, before: mx.array | None, positions: mx.array, caches: list[Any]
    ) -> mx.array:
        """Run `guess` for its cache writes; the unused draft is never evaluated."""
        counts = [tokens.shape[1]] * tokens.shape[0]
        return self.guess(DraftInput(tokens, before, counts, counts), positions, caches, 1)

    def guess(self, feed: DraftInput, positions: mx.array, caches: list[Any], count: int) -> mx.array:
        """Embed only the last token: earlier ones enter as the target's hidden states."""
        assert feed.before is not None, "hidden states are required"
        counts = mx.array(feed.counts, mx.int32)
        lasts = mx.take_along_axis(feed.tokens, counts[:, None] - 1, axis=1)[:, 0]
        contexts = [
            BlockContext(cache, _offset(cache), positions[:, 0], counts, self._window) for cache in caches
        ]
        block = min(count, self.block) + 1
        found: mx.array = self._module.draft_block(lasts, feed.before, contexts, block, _likeliest, mx.uint32)
        return found


def _offset(cache: Any) -> mx.array:
    return mx.array(cache.offset, mx.int32).reshape(-1)


def _likeliest(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)
