"""Storable copies of a row's caches, and rows restored from them.

KV layers are stored by columns, for a span of tokens at a time. All other layers are stored whole, at one
position: recurrent states, and whatever else upstream's models invent. The kind is found by a cache's
methods. Stored copies are evaluated, and keep nothing of the row alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map, tree_unflatten

from worker.runner.kv.batch import CacheBatch, RowCaches, leaf_caches
from worker.runner.kv.single import (
    fill,
    in_time_order,
    is_positional,
    reserved_columns,
    restore_state,
    state_of,
)
from worker.runner.trees import arrays_of, leaves_of
from worker.values import ArrayBytes, CacheSegment, CacheSlice, CacheSpec

Leaves = tuple[mx.array, ...]

_NAMES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "U16": mx.uint16, "U32": mx.uint32, "U64": mx.uint64, "I8": mx.int8,
    "I16": mx.int16, "I32": mx.int32, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16,
    "F32": mx.float32, "F64": mx.float64, "C64": mx.complex64,
}  # fmt: skip
_DTYPES = {dtype: name for name, dtype in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class KVSlice:
    """Keys and values of a span of tokens in each KV layer: each [1, heads, tokens, width]; of a quantized
    row three arrays for each, with scales and biases.

    A sliding window may have lost the first tokens; what is left ends with the span.
    """

    layers: tuple[Leaves, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaves in self.layers for leaf in leaves)


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The state of each other layer at one position, as upstream's cache returns it."""

    layers: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in arrays_of(self.layers).values())


def shape_of(caches: RowCaches) -> CacheSpec:
    """Return what a row with such caches needs to continue from a position."""
    parts = list(leaf_caches(caches))
    windows = [getattr(part, "max_size", None) or 1 for part in parts if is_positional(part)]
    return CacheSpec(
        window=max(windows, default=1) - 1,
        has_states=not all(is_positional(part) for part in parts),
    )


def columns_of(source: RowCaches | CacheBatch, row: int, first: int, last: int) -> tuple[KVSlice, int]:
    """Copy the columns of positions `first` to before `last`, lazily. Return them, and the position from
    which on they are complete. `row`: its index in a batch."""
    found: Sequence[Sequence[mx.array]]
    if isinstance(source, CacheBatch):
        found = source.columns(row, first, last)
    else:
        found = [_columns(part, first, last) for part in leaf_caches(source) if is_positional(part)]
    layers = tuple(tuple(mx.contiguous(leaf) for leaf in leaves) for leaves in found)
    held = min((leaves[0].shape[2] for leaves in layers), default=last - first)
    return KVSlice(layers), last - held


def states_of(source: RowCaches | CacheBatch, row: int) -> StateSnapshot:
    """Copy the current states, lazily. `row`: its index in a batch."""
    if isinstance(source, CacheBatch):
        found = source.states(row)
    else:
        found = [state_of(part) for part in leaf_caches(source) if not is_positional(part)]
    return StateSnapshot(tuple(tree_map(_copied, state) for state in found))


def cuts_of(
    source: RowCaches | CacheBatch, row: int, runs: Sequence[tuple[int, int]], *, states: bool
) -> tuple[list[CacheSlice], CacheSlice | None]:
    """Copy spans of columns and, if asked, the states, as `Engine.copy_cache`. `row`: its index in a
    batch."""
    columns = [columns_of(source, row, first, last) for first, last in runs]
    state = states_of(source, row) if states else None
    mx.eval([arrays_of(held.layers) for held, _ in columns], arrays_of(state and state.layers))
    cuts = [CacheSlice(held, held.nbytes, complete_from) for held, complete_from in columns]
    return cuts, None if state is None else CacheSlice(state, state.nbytes)


def rebuild(
    fresh: RowCaches, pieces: Sequence[CacheSegment], states: object | None, expected: int = 0
) -> None:
    """Restore `fresh`, empty caches of a single row, to the end of the last of `pieces`. `expected`: number
    of tokens that the row will have; its buffers get room for them where `reserve` would give it.

    The columns of the pieces are copied once. Raises `ValueError` for payloads of the wrong type.
    """
    if not isinstance(states, StateSnapshot | None):
        raise ValueError(f"not a state snapshot: {type(states).__name__}")
    length = pieces[-1].first + pieces[-1].count
    parts = list(leaf_caches(fresh))
    for index, part in enumerate(part for part in parts if is_positional(part)):
        wanted = length if (window := getattr(part, "max_size", None)) is None else min(length, window - 1)
        runs = _runs(pieces, index, length - wanted)
        columns = reserved_columns(part, expected) if length < expected else 0
        fill(part, [_joined(run, columns) for run in zip(*runs, strict=True)], length)
    others = [part for part in parts if not is_positional(part)]
    for part, state in zip(others, states.layers if states else (), strict=True):
        restore_state(part, tree_map(_copied, state))


def _joined(run: Sequence[mx.array], columns: int) -> mx.array:
    """Copy the columns of arrays, lazily, into one with at least as many columns as given."""
    batch, heads, _, width = run[0].shape
    missing = columns - sum(leaf.shape[2] for leaf in run)
    room = [mx.zeros((batch, heads, missing, width), run[0].dtype)] if missing > 0 else []
    return mx.concatenate([*run, *room], axis=2)


def _runs(pieces: Sequence[CacheSegment], layer: int, start: int) -> Iterator[Leaves]:
    """Yield one layer's leaves from position `start` on, piece by piece."""
    for piece in pieces:
        if piece.first + piece.count <= start:
            continue
        if not isinstance(piece.payload, KVSlice):
            raise ValueError(f"not a KV slice: {type(piece.payload).__name__}")
        leaves = piece.payload.layers[layer]
        begin = piece.last - leaves[0].shape[2]
        stop = max(piece.first + piece.count - begin, 0)
        yield tuple(leaf[:, :, max(start - begin, 0) : stop] for leaf in leaves)


def _columns(cache: Any, first: int, last: int) -> Leaves:
    leaves, end = in_time_order(cache), cache.offset
    window: int | None = getattr(cache, "max_size", None)
    held = leaves[0].shape[2]
    if window is not None and held <= window:
        held = min(held, window - 1)  # the oldest may be the filler of a restored row
    base = end - leaves[0].shape[2]
    begin = max(first, end - held)
    return tuple(leaf[:, :, begin - base : max(begin, last) - base] for leaf in leaves)


def _copied(leaf: Any) -> Any:
    # A separate array object: upstream's caches write into theirs in place.
    return mx.contiguous(leaf) if isinstance(leaf, mx.array) else leaf


def pack(stored: KVSlice | StateSnapshot) -> tuple[dict[str, ArrayBytes], Any]:
    """Return the arrays by name, without copying their data, and the rest as JSON values."""
    tree = stored.layers
    arrays = arrays_of(tree)
    # Any: an array supports the buffer protocol, which the stubs omit.
    views: dict[str, Any] = {
        name: mx.contiguous(leaf).reshape(-1).view(mx.uint8) for name, leaf in arrays.items()
    }
    mx.eval(views)
    blobs = {
        name: ArrayBytes(_DTYPES[leaf.dtype], tuple(leaf.shape), memoryview(views[name]))
        for name, leaf in arrays.items()
    }
    kind = "columns" if isinstance(stored, KVSlice) else "states"
    others = [(name, leaf) for name, leaf in leaves_of(tree) if name not in arrays]
    return blobs, {"kind": kind, "others": others}


def allocate(nbytes: int) -> memoryview:
    """Return the memory of a new array of bytes, which `unpack` shares."""
    buffer: Any = mx.empty((nbytes,), mx.uint8)
    mx.eval(buffer)
    return memoryview(buffer)


def unpack(blobs: Mapping[str, ArrayBytes], rest: Any) -> KVSlice | StateSnapshot:
    """Restore what `pack` returned; what lies in memory of `allocate` is not copied. Raises `ValueError` or
    `KeyError` for anything else."""
    leaves: list[tuple[str, Any]] = [(name, _array(blob)) for name, blob in blobs.items()]
    mx.eval([leaf for _, leaf in leaves])
    leaves += [(name, leaf) for name, leaf in rest["others"]]
    # Lists replace tuples: upstream's setters unpack either.
    tree: Any = tree_unflatten(leaves) if leaves else []
    if rest["kind"] == "states":
        return StateSnapshot(tuple(tree))
    return KVSlice(tuple(tuple(layer) for layer in tree))


def _array(blob: ArrayBytes) -> mx.array:
    lent: Any = memoryview(blob.data).cast("B")
    shared = lent.obj
    octets = shared[blob.begin : blob.begin + lent.nbytes] if isinstance(shared, mx.array) else mx.array(lent)
    return octets.view(_NAMES[blob.dtype]).reshape(blob.shape)
