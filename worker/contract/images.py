"""Image inputs of a prompt, and arrays as plain bytes. Part of the lowest layer, like `contract`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of the storable dtypes, by their safetensors names."""

MEDIA_KEYS = 2**32
"""Smallest key that replaces an image token; keys are below 2**64 (`ImageInput.keys`)."""


@dataclass(frozen=True, slots=True)
class ArrayBytes:
    """An array as bytes: little-endian, row-major, contiguous; not copied. Raises `ValueError` if dtype,
    shape and size do not match."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        nbytes = memoryview(self.data).nbytes
        if self.dtype not in ITEM_BYTES or min(self.shape, default=0) < 0:
            raise ValueError(f"invalid array: {self.dtype} {self.shape}")
        if nbytes != math.prod(self.shape) * ITEM_BYTES[self.dtype]:
            raise ValueError(f"{nbytes} bytes do not match {self.dtype} {self.shape}")


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image or a video in a prompt, at position `first`; `tokens` are the placeholders that upstream's
    processor writes for it.

    `digest`: hexadecimal hash of its content and of everything else that its encoding depends on. `inputs`:
    the encoder's inputs, by upstream's names. `nbytes`: estimated size of its embedding.
    """

    digest: str
    first: int
    tokens: tuple[int, ...]
    inputs: Mapping[str, ArrayBytes]
    nbytes: int = 0

    @property
    def input_bytes(self) -> int:
        """Size of the encoder's inputs."""
        return sum(memoryview(each.data).nbytes for each in self.inputs.values())

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.first + len(self.tokens)

    def keys(self) -> tuple[int, ...]:
        """Return the keys that replace its tokens in `EngineRequest.tokens`, one for each, below 2**64. Equal
        images have equal keys, so prompts with equal images share prefixes."""
        seed = int(self.digest[:16], 16)
        span = 2**64 - MEDIA_KEYS
        return tuple(MEDIA_KEYS + (seed + place) % span for place in range(len(self.tokens)))


def keyed(tokens: Sequence[int], images: Sequence[ImageInput]) -> Sequence[int]:
    """Return a prompt's tokens, with image tokens replaced by keys."""
    if not images:
        return tokens
    keys = list(tokens)
    for image in images:
        keys[image.first : image.end] = image.keys()
    return keys
