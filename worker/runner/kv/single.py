"""Helpers for upstream's cache of a single row and layer: its kind, its contents, and filling it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from worker.runner.kv.buckets import capacity

_GROWING = {KVCache.update_and_fetch, QuantizedKVCache.update_and_fetch}
"""Updates that write behind the last token, into buffers of any width."""


def is_positional(like: Any) -> bool:
    """Return whether a single row's cache stores something for each token, in columns that are all alike."""
    # Some of upstream's keep their first tokens whatever the window, or report their start position as one
    # number.
    return (
        hasattr(like, "update_and_fetch")
        and hasattr(like, "keys_and_values")
        and not hasattr(like, "start_position")
        and not getattr(like, "keep", 0)
    )


def is_split(like: Any) -> bool:
    """Return whether a layer's several caches are handled one by one: each is of mlx-lm's kinds, or has a
    fixed size. Others grow in ways of their own, and together."""
    parts = getattr(like, "caches", ())
    return bool(parts) and all(hasattr(part, "keys_and_values") or not grows(part) for part in parts)


def grows(like: Any) -> bool:
    """Return whether a single row's cache grows with its tokens, in whatever way."""
    return hasattr(like, "update_and_fetch") or any(map(grows, getattr(like, "caches", ())))


def offset_of(caches: Iterable[Any]) -> Any:
    """Return the next position of a row, or of each row of a batch, by the first cache that grows; 0: none
    does."""
    for cache in caches:
        if hasattr(cache, "update_and_fetch"):
            return cache.offset
        if grows(cache):
            return offset_of(cache.caches)
    return 0


def state_of(cache: Any) -> Any:
    """Return what a cache holds, of a composite one by parts; None: nothing."""
    if hasattr(cache, "caches"):
        return [state_of(part) for part in cache.caches]
    return None if hasattr(cache, "empty") and cache.empty() else cache.state


def restore_state(cache: Any, state: Any) -> None:
    """Give an empty cache what `state_of` returned."""
    if hasattr(cache, "caches"):
        for part, own in zip(cache.caches, state, strict=True):
            restore_state(part, own)
    elif state is not None:
        cache.state = state


def in_time_order(row: Any) -> list[mx.array]:
    """Return the leaves of a single row's cache, oldest token first; empty if the cache is."""
    if row.empty():
        return []
    keys, values = row.keys_and_values()
    # Quantized keys are a list or a tuple, depending on whether upstream has sliced them.
    leaves = [keys, values] if isinstance(keys, mx.array) else [*keys, *values]
    next_place = row.state[-1] if hasattr(row, "max_size") else None
    if next_place is None or next_place >= leaves[0].shape[2]:
        return leaves
    return [mx.concatenate([leaf[:, :, next_place:], leaf[:, :, :next_place]], axis=2) for leaf in leaves]


def reserve(caches: Iterable[Any], tokens: int) -> None:
    """Widen the buffers of a single row, lazily, to what a batch would give a row of `tokens` tokens: more
    tokens are then written without copying those before. Caches of other kinds stay as they are."""
    for cache in caches:
        if hasattr(cache, "caches"):
            reserve(cache.caches, tokens)
        elif (columns := reserved_columns(cache, tokens)) and not cache.empty():
            cache.keys = tree_map(partial(_widened, columns=columns), cache.keys)
            cache.values = tree_map(partial(_widened, columns=columns), cache.values)


def reserved_columns(cache: Any, tokens: int) -> int:
    """Return the width that `reserve` gives to a layer's buffers; 0: it leaves them as they are."""
    return capacity(tokens) if type(cache).__dict__.get("update_and_fetch") in _GROWING else 0


def _widened(leaf: mx.array, columns: int) -> mx.array:
    missing = columns - leaf.shape[2]
    return mx.pad(leaf, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing > 0 else leaf


def whole_buffers(row: Any) -> list[mx.array]:
    """Return the buffers of a single row's cache, with their empty columns; none if it is empty, or if its
    columns are not in order."""
    if row.empty() or hasattr(row, "max_size"):
        return []
    return [row.keys, row.values] if isinstance(row.keys, mx.array) else [*row.keys, *row.values]


def fill(fresh: Any, leaves: Sequence[mx.array], length: int) -> None:
    """Fill an empty cache with a row of `length` tokens. `leaves`: of all of them, or of those that its
    window shows to the next token, oldest first. Nothing else may write to them."""
    if not leaves or not length:
        return
    parts, window = list(leaves), getattr(fresh, "max_size", None)
    _, _, _, *rest = fresh.state
    if window is not None:
        if length >= window:
            # Upstream's cache is as wide as the window; its oldest column is overwritten before it is read.
            parts = [mx.concatenate([part[:, :, :1], part], axis=2) for part in parts]
        rest[-1] = parts[0].shape[2]
    pair = (tuple(parts[:3]), tuple(parts[3:])) if len(parts) > 2 else (parts[0], parts[1])
    fresh.state = (*pair, length, *rest)
