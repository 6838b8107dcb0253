"""The images of a prompt, and arrays as plain bytes. The ground of the worker, as `contract` is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""The element types that can be stored, by the names safetensors gives them."""

MEDIA_KEYS = 2**32
"""From here on, below 2**64, are the keys in place of the tokens that an image stands for: see `Picture`."""


@dataclass(frozen=True, slots=True)
class Blob:
    """An array as bytes: little-endian, row-major, contiguous; not copied. Raises `ValueError` where the
    three do not agree."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        nbytes = memoryview(self.data).nbytes
        if self.dtype not in ITEM_BYTES or min(self.shape, default=0) < 0:
            raise ValueError(f"no array: {self.dtype} {self.shape}")
        if nbytes != math.prod(self.shape) * ITEM_BYTES[self.dtype]:
            raise ValueError(f"{nbytes} bytes are no {self.dtype} {self.shape}")


@dataclass(frozen=True, slots=True)
class Picture:
    """An image, or a video, as it stands in a prompt: from position `first` on, in place of the `tokens` that
    upstream's processor writes for it.

    `digest`, hexadecimal, names its content and all else that its encoding depends on: two with one digest
    are encoded alike. `inputs`: what the encoder takes, by upstream's names for it. `nbytes`: what will be
    kept of it once it is encoded, estimated.
    """

    digest: str
    first: int
    tokens: tuple[int, ...]
    inputs: Mapping[str, Blob]
    nbytes: int = 0

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.first + len(self.tokens)

    def keys(self) -> tuple[int, ...]:
        """What stands for its tokens in `Prepared.tokens`, so that prompts are the same where their images
        are: each place of each image has its own, below 2**64."""
        seed = int(self.digest[:16], 16)
        span = 2**64 - MEDIA_KEYS
        return tuple(MEDIA_KEYS + (seed + place) % span for place in range(len(self.tokens)))


def keyed(tokens: Sequence[int], pictures: Sequence[Picture]) -> Sequence[int]:
    """A prompt's tokens with the keys of its images in place of theirs."""
    if not pictures:
        return tokens
    keys = list(tokens)
    for picture in pictures:
        keys[picture.first : picture.end] = picture.keys()
    return keys
