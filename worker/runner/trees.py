"""Helpers for the trees of lists, tuples and dictionaries that upstream's caches keep their arrays in."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


def leaves_of(tree: Any) -> list[tuple[str, Any]]:
    """Return all leaves, each with its path as its name."""
    leaves = tree_flatten(tree)
    assert isinstance(leaves, list), "tree_flatten returns a list by default"
    return leaves


def arrays_of(tree: Any) -> dict[str, mx.array]:
    """Return the leaves that are arrays, by name."""
    return {name: leaf for name, leaf in leaves_of(tree) if isinstance(leaf, mx.array)}


def held_bytes(cache: Any) -> int:
    """Return the bytes of a cache: its `nbytes`, or else the size of its state."""
    told: int | None = getattr(cache, "nbytes", None)
    return sum(array.nbytes for array in arrays_of(cache.state).values()) if told is None else told
