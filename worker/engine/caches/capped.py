"""KV caches of a single row that are capped as upstream's `max_kv_size` caps them (see `contract.kv_cap`).

Upstream's rotating cache masks by the number of a column, so its results depend on how a prompt is cut. This
one masks by position, and gives the results of upstream's default steps for any chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache, RotatingKVCache

from worker.contract.kv_cap import KVCap
from worker.contract.kv_quantization import NEVER

RETAINED_TOKENS = 256
"""Tokens of a prompt that stay in its cache beyond those in use, until the prefix cache has stored them."""


class CappedKVCache(RotatingKVCache):
    """Upstream's rotating cache, with masks by position. Its columns are all tokens so far, or the sinks and
    the last tokens. Tokens from `decode_from` on attend as those of an answer."""

    def __init__(self, cap: KVCap) -> None:
        upstream: Any = super()
        upstream.__init__(max_size=cap.max_size, keep=cap.sinks)
        self.cap = cap
        self.decode_from = NEVER

    @property
    def has_gap(self) -> bool:
        """Whether tokens behind the sinks were dropped."""
        return self.keys is not None and self.offset > self.keys.shape[2]

    def in_time_order(self) -> list[mx.array]:
        """Return keys and values of the tokens that it has, oldest first."""
        own: Any = self
        return [own._temporal_order(leaf) for leaf in (self.keys, self.values)]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write tokens, [1, heads, tokens, width]; return the columns that `make_mask` counts."""
        own: Any = self
        is_short = self.offset < self.max_size
        if keys.shape[2] == 1 and (is_short or self.offset >= self.decode_from):
            found: tuple[mx.array, mx.array] = own._update_in_place(keys, values)
            return found
        if self.keys is None:
            self.keys, self.values = keys, values
        else:
            excess = self._held - self._held_max
            ordered, new = self.in_time_order(), (keys, values)
            pair = [own._trim(excess, old, more) for old, more in zip(ordered, new, strict=True)]
            self.keys, self.values = pair
        self.offset += keys.shape[2]
        self._idx = self.keys.shape[2]
        return self.keys, self.values

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """Return the mask of the next `N` tokens, [tokens, columns] bool; None or "causal" as upstream."""
        if window_size is not None:
            raise ValueError("its layers have sliding windows of their own")
        last = self.offset + N
        if N == 1 and (last <= self.max_size or self.offset >= self.decode_from):
            return None
        if last <= self.max_size and not return_array:
            return "causal"
        held = min(self._held, self._held_max)
        columns = mx.arange(last)
        if held < self.offset:
            columns = mx.concatenate([columns[: self.keep], columns[self.offset + self.keep - held :]])
        return self._visible(columns[-N:], columns)

    def _visible(self, asking: mx.array, columns: mx.array) -> mx.array:
        """Return which of the positions `columns` the tokens at positions `asking` attend to."""
        asking, keep, size = asking[:, None], self.keep, self.max_size
        began = asking // self.cap.step * self.cap.step
        drops = began >= size - 1  # before the step, upstream drops tokens behind the sinks
        oldest = mx.maximum(asking - size + 1, mx.where(drops, began - size + 1 + keep, 0))
        in_prompt = (columns >= oldest) | (drops & (columns < keep) & (columns >= asking - began))
        in_answer = (columns > asking - (size - keep)) | (columns < keep)
        is_prompt = asking < min(self.decode_from, 2**31 - 1)
        return (columns <= asking) & mx.where(is_prompt, in_prompt, in_answer)

    @property
    def _held(self) -> int:
        return 0 if self.keys is None else min(self.offset, self.keys.shape[2])

    @property
    def _held_max(self) -> int:
        return int(self.keep + self.max_size - 1 + RETAINED_TOKENS)

    @classmethod
    def merge(cls, caches: Sequence[CappedKVCache]) -> CappedPrefill:
        """Return the cache of a batch of prompts that begin. Raises `ValueError` if one has begun."""
        if any(cache.offset for cache in caches):
            raise ValueError("capped rows are batched for their first chunk only")
        return CappedPrefill(caches)


class CappedPrefill(BatchKVCache):
    """Cache of a batch of whole prompts, in which no token is dropped."""

    def __init__(self, caches: Sequence[CappedKVCache]) -> None:
        super().__init__([0] * len(caches))
        self._like = caches[0]

    def make_mask(self, N: int, return_array: bool = False, **sizes: int | None) -> Any:
        """Return the mask of each row, [tokens, columns] bool; padding is behind a row's tokens."""
        assert not self._idx, "prompts are run whole"
        return self._like.make_mask(N, return_array=return_array, **sizes)

    def extract(self, idx: int) -> CappedKVCache:
        """Return a row as a cache of its own."""
        upstream: Any = super()
        own, row = upstream.extract(idx), CappedKVCache(self._like.cap)
        row.keys, row.values, row.offset, row._idx = own.keys, own.values, own.offset, own.offset
        return row


def begin_decoding(caches: Iterable[Any]) -> None:
    """Have the next tokens of a row attend as those of an answer, if its caches are capped."""
    for cache in caches:
        if isinstance(cache, CappedKVCache):
            cache.decode_from = min(cache.decode_from, cache.offset)


def columns_max(caches: Iterable[Any]) -> int | None:
    """Return the most tokens that the caches of a row hold if they are capped; None: they are not."""
    return next((cache.max_size for cache in caches if isinstance(cache, CappedKVCache)), None)


def cap_caches(network: nn.Module, cap: KVCap) -> None:
    """Have upstream's `make_prompt_cache` make capped caches for a network without `make_cache`."""
    whole: Any = network
    whole.make_cache = lambda: [CappedKVCache(cap) for _ in whole.layers]
