"""Helpers for upstream's cache of a single row and layer: its kind, its contents, and filling it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


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
