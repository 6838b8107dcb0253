"""Trees of lists, tuples and dictionaries, as upstream keeps arrays in them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


def leaves_of(tree: Any) -> list[tuple[str, Any]]:
    """All leaves, each with the way to it as its name."""
    leaves = tree_flatten(tree)
    assert isinstance(leaves, list), "a dictionary comes only where one was given"
    return leaves


def arrays_of(tree: Any) -> dict[str, mx.array]:
    """The leaves that are arrays, by name."""
    return {name: leaf for name, leaf in leaves_of(tree) if isinstance(leaf, mx.array)}


def held_bytes(cache: Any) -> int:
    """What a cache holds; of one that does not say, its state."""
    told: int | None = getattr(cache, "nbytes", None)
    return sum(array.nbytes for array in arrays_of(cache.state).values()) if told is None else told
