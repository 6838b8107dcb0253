"""Serialization of stored KV slices and state snapshots to bytes, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from worker.contract.images import ArrayBytes
from worker.engine.caches.snapshots import KVSlice, StateSnapshot
from worker.engine.trees import arrays_of, leaves_of

_NAMES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "U16": mx.uint16, "U32": mx.uint32, "U64": mx.uint64, "I8": mx.int8,
    "I16": mx.int16, "I32": mx.int32, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16,
    "F32": mx.float32, "F64": mx.float64, "C64": mx.complex64,
}  # fmt: skip
_DTYPES = {dtype: name for name, dtype in _NAMES.items()}


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


def unpack(blobs: Mapping[str, ArrayBytes], rest: Any) -> KVSlice | StateSnapshot:
    """Restore what `pack` returned. Raises `ValueError` or `KeyError` for anything else."""
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
    return mx.array(lent).view(_NAMES[blob.dtype]).reshape(blob.shape)
