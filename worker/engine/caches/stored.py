"""What is stored of a row's caches, and rows made of it again.

A layer that keeps something for each token is stored by columns, for a run of tokens at a time. Any other is
stored whole, as it stood at one position: a recurrent state, and whatever else upstream's models invent.
Which is which is found by what a cache can do. What is stored is evaluated, and pins nothing of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from worker.contract import Cut, Piece, Shape
from worker.engine.caches.batch import Batch, RowCaches, leaf_caches
from worker.engine.caches.single import fill, is_positional, temporal
from worker.engine.trees import arrays_of

Leaves = tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class Columns:
    """Keys and values of a run of tokens, for each layer that has them: each [1, heads, tokens, width].

    A sliding window may have lost the first of them; what there is ends with the run.
    """

    layers: tuple[Leaves, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaves in self.layers for leaf in leaves)


@dataclass(frozen=True, slots=True)
class States:
    """The state of each other layer at one position, as upstream's cache gives it out."""

    layers: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in arrays_of(self.layers).values())


def shape_of(caches: RowCaches) -> Shape:
    """What a row with such caches needs to go on from a position."""
    parts = list(leaf_caches(caches))
    windows = [getattr(part, "max_size", None) or 1 for part in parts if is_positional(part)]
    return Shape(
        window=max(windows, default=1) - 1, has_states=not all(is_positional(part) for part in parts)
    )


def columns_of(source: RowCaches | Batch, row: int, first: int, last: int) -> tuple[Columns, int]:
    """A copy of the columns of positions `first` to before `last`, lazily, and from which one on they are all
    there. `row`: of a batch."""
    found: Sequence[Sequence[mx.array]]
    if isinstance(source, Batch):
        found = source.columns(row, first, last)
    else:
        found = [_columns(part, first, last) for part in leaf_caches(source) if is_positional(part)]
    layers = tuple(tuple(mx.contiguous(leaf) for leaf in leaves) for leaves in found)
    held = min((leaves[0].shape[2] for leaves in layers), default=last - first)
    return Columns(layers), last - held


def states_of(source: RowCaches | Batch, row: int) -> States:
    """A copy of the states as they stand, lazily. `row`: of a batch."""
    if isinstance(source, Batch):
        found = source.states(row)
    else:
        found = [part.state for part in leaf_caches(source) if not is_positional(part)]
    return States(tuple(tree_map(_copied, state) for state in found))


def cuts_of(
    source: RowCaches | Batch, row: int, runs: Sequence[tuple[int, int]], *, states: bool
) -> tuple[list[Cut], Cut | None]:
    """See `contract.Engine.cut`. `row`: of a batch."""
    columns = [columns_of(source, row, first, last) for first, last in runs]
    state = states_of(source, row) if states else None
    mx.eval([arrays_of(held.layers) for held, _ in columns], arrays_of(state and state.layers))
    cuts = [Cut(held, held.nbytes, whole_from) for held, whole_from in columns]
    return cuts, None if state is None else Cut(state, state.nbytes)


def rebuild(fresh: RowCaches, pieces: Sequence[Piece], states: object | None) -> None:
    """Make `fresh`, empty caches of a single row, stand where the last of `pieces` ends.

    Raises `ValueError` for payloads that are no columns, or no states.
    """
    if not isinstance(states, States | None):
        raise ValueError(f"no states: {type(states).__name__}")
    length = pieces[-1].first + pieces[-1].count
    parts = list(leaf_caches(fresh))
    for index, part in enumerate(part for part in parts if is_positional(part)):
        wanted = length if (window := getattr(part, "max_size", None)) is None else min(length, window - 1)
        runs = list(_runs(pieces, index, length - wanted))
        fill(part, [mx.concatenate(list(run), axis=2) for run in zip(*runs, strict=True)], length)
    others = [part for part in parts if not is_positional(part)]
    for part, state in zip(others, states.layers if states else (), strict=True):
        part.state = tree_map(_copied, state)


def _runs(pieces: Sequence[Piece], layer: int, start: int) -> Iterator[Leaves]:
    """One layer's leaves from position `start` on, piece by piece."""
    for piece in pieces:
        if piece.first + piece.count <= start:
            continue
        if not isinstance(piece.payload, Columns):
            raise ValueError(f"no columns: {type(piece.payload).__name__}")
        leaves = piece.payload.layers[layer]
        begin = piece.last - leaves[0].shape[2]
        stop = max(piece.first + piece.count - begin, 0)
        yield tuple(leaf[:, :, max(start - begin, 0) : stop] for leaf in leaves)


def _columns(cache: Any, first: int, last: int) -> Leaves:
    leaves, end = temporal(cache), cache.offset
    window = getattr(cache, "max_size", None)
    held = leaves[0].shape[2]
    if window is not None and held <= window:
        held = min(held, window - 1)  # the oldest may be the filler of a row that was made anew
    base = end - leaves[0].shape[2]
    begin = max(first, end - held)
    return tuple(leaf[:, :, begin - base : max(begin, last) - base] for leaf in leaves)


def _copied(leaf: Any) -> Any:
    # An array object of its own: upstream's caches write into theirs in place.
    return mx.contiguous(leaf) if isinstance(leaf, mx.array) else leaf
