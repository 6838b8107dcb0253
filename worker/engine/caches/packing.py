"""Stored columns and states as bytes for a file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from worker.engine.caches.stored import Columns, States
from worker.engine.trees import arrays_of, leaves_of
from worker.pictures import Blob

_NAMES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "U16": mx.uint16, "U32": mx.uint32, "U64": mx.uint64, "I8": mx.int8,
    "I16": mx.int16, "I32": mx.int32, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16,
    "F32": mx.float32, "F64": mx.float64, "C64": mx.complex64,
}  # fmt: skip
_DTYPES = {dtype: name for name, dtype in _NAMES.items()}


def pack(stored: Columns | States) -> tuple[dict[str, Blob], Any]:
    """The arrays by name, without a copy of their data, and what JSON can hold of the rest."""
    tree = stored.layers
    arrays = arrays_of(tree)
    # Any: an array lends its bytes, which the stubs do not say.
    views: dict[str, Any] = {
        name: mx.contiguous(leaf).reshape(-1).view(mx.uint8) for name, leaf in arrays.items()
    }
    mx.eval(views)
    blobs = {
        name: Blob(_DTYPES[leaf.dtype], tuple(leaf.shape), memoryview(views[name]))
        for name, leaf in arrays.items()
    }
    kind = "columns" if isinstance(stored, Columns) else "states"
    others = [(name, leaf) for name, leaf in leaves_of(tree) if name not in arrays]
    return blobs, {"kind": kind, "others": others}


def unpack(blobs: Mapping[str, Blob], rest: Any) -> Columns | States:
    """Raises `ValueError` or `KeyError` for what `pack` did not make."""
    leaves: list[tuple[str, Any]] = [(name, _array(blob)) for name, blob in blobs.items()]
    mx.eval([leaf for _, leaf in leaves])
    leaves += [(name, leaf) for name, leaf in rest["others"]]
    # Lists take the place of tuples: upstream's setters unpack either.
    tree: Any = tree_unflatten(leaves) if leaves else []
    if rest["kind"] == "states":
        return States(tuple(tree))
    return Columns(tuple(tuple(layer) for layer in tree))


def _array(blob: Blob) -> mx.array:
    lent: Any = memoryview(blob.data).cast("B")
    return mx.array(lent).view(_NAMES[blob.dtype]).reshape(blob.shape)
