"""Encoder cache: the encoded images, and which prompts wait for one. Pure.

An image is *needed* while a row in prefill has a part of it to run. Invariants: cached images take at most
`bytes_max`, or are a single one that turned out larger than estimated. A needed image is evicted only if
another has no room otherwise. Need is computed when room is made, so no row can leak a pin.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import NamedTuple

from protocol.errors import Code, RequestError
from protocol.prefix_namespace import contains
from protocol.types import ImageStatus
from worker.core.rows import CHUNK_TOKENS_MIN, Chunk, Row
from worker.values import EncodedImage, EngineRequest, ImageInput


def images_of(request: EngineRequest) -> tuple[ImageInput, ...]:
    """Return a request's images, with digests that requests of another salt do not share.

    The time to the first token must not reveal whether another client has sent the same image.
    """
    if not request.salt:
        return request.images
    return tuple(replace(image, digest=_salted(image.digest, request.salt)) for image in request.images)


def _salted(digest: str, salt: str) -> str:
    return hashlib.sha256(f"{digest}/{salt}".encode("utf-8", "surrogatepass")).hexdigest()


def _needed(rows: Iterable[Row]) -> Set[str]:
    return {image.digest for row in rows for image in row.images if image.end > row.prefilled}


def _images_in(chunk: Chunk) -> list[ImageInput]:
    """Return the images of which a chunk has a part. Valid before the chunk has run."""
    begin, end = chunk.begin, chunk.begin + len(chunk.tokens)
    return [image for image in chunk.row.images if max(begin, image.first) < min(end, image.end)]


class CachedImage(NamedTuple):
    """An encoded image in the cache, and the salt of the requests that share it."""

    encoded: EncodedImage
    salt: str


class EncoderCache:
    """LRU cache of encoded images, the least recently used first. `bytes_max`: None for no limit."""

    def __init__(self, bytes_max: int | None) -> None:
        self._bytes_max = sys.maxsize if bytes_max is None else bytes_max
        self._kept: dict[str, CachedImage] = {}
        self._encoded = 0
        self._hits = 0

    @property
    def bytes(self) -> int:
        return sum(image.encoded.nbytes for image in self._kept.values())

    def check(self, request: EngineRequest) -> None:
        """Raise `RequestError` for a request with an image that could not be cached even alone."""
        most = max((image.nbytes for image in request.images), default=0)
        if most > self._bytes_max:
            message = (
                f"An image of this request takes {most} bytes once it is encoded, and this server has "
                f"{self._bytes_max} bytes for encoded images. Send a smaller image."
            )
            raise RequestError(Code.CONTEXT_LENGTH_EXCEEDED, message, param=request.source)

    # --- what rows need ---

    def missing(self, row: Row, begin: int) -> ImageInput | None:
        """Return the first image that a row needs from position `begin` on and that is not cached."""
        for image in row.images:
            if image.end > begin and image.digest not in self._kept:
                return image
        return None

    def reach(self, row: Row, begin: int) -> int:
        """Return the position up to which a row can run from `begin`; `begin` if an image must be encoded.

        Text that is shorter than the smallest chunk is run together with the image behind it. Not so an
        image: with room for one of them only, each would evict the other for ever.
        """
        image = self.missing(row, begin)
        if image is None:
            return len(row.tokens) - 1
        is_next = all(other.end <= begin or other.first >= image.first for other in row.images)
        is_short = image.first - begin < CHUNK_TOKENS_MIN
        return begin if is_next and is_short else image.first

    def embeddings(self, chunk: Chunk) -> Mapping[str, EncodedImage]:
        """Return the embeddings of the images in a chunk that is going to run, by digest."""
        return {image.digest: self._kept[image.digest].encoded for image in _images_in(chunk)}

    # --- what has happened ---

    def make_room(self, nbytes: int, rows: Iterable[Row]) -> None:
        """Evict images to make room for `nbytes` bytes.

        `rows`: the rows in prefill; images that they need are evicted last.
        """
        needed = _needed(rows)
        self._forget(sorted(self._kept, key=needed.__contains__), self._bytes_max - nbytes)

    def add(self, row: Row, image: ImageInput, encoded: EncodedImage) -> None:
        """Add an image that was encoded for `row`. Others are evicted if it takes more than was estimated."""
        self._encoded += 1
        row.encoded_for_row.add(image.digest)
        others = [digest for digest in self._kept if digest != image.digest]
        self._kept[image.digest] = CachedImage(encoded, row.request.salt)
        self._forget(others, self._bytes_max)

    def ran(self, chunk: Chunk) -> None:
        """Record that a chunk was run. To be called before `row.prefilled` advances."""
        for image in _images_in(chunk):
            self._kept[image.digest] = self._kept.pop(image.digest)
            self._count(chunk.row, image)

    def _count(self, row: Row, image: ImageInput) -> None:
        """Count a hit or a miss, once for each image of a prompt."""
        if image.first >= row.images_counted_upto:
            row.images_counted_upto = image.end
            self._hits += image.digest not in row.encoded_for_row
            row.encoded_for_row.discard(image.digest)

    def clear(self, rows: Iterable[Row], namespace: str = "") -> int:
        """Evict a namespace's images that rows in prefill do not need; return the bytes freed."""
        before, needed = self.bytes, _needed(rows)
        unneeded = ((digest, image) for digest, image in self._kept.items() if digest not in needed)
        self._forget([digest for digest, image in unneeded if contains(namespace, image.salt)], 0)
        return before - self.bytes

    def _forget(self, digests: Iterable[str], bytes_max: int) -> None:
        """Evict images in this order until the rest takes at most `bytes_max`."""
        for digest in digests:
            if self.bytes <= bytes_max:
                break
            del self._kept[digest]

    def status(self) -> ImageStatus:
        """Return sizes, and counts since the start."""
        return ImageStatus(
            bytes=self.bytes,
            bytes_max=self._bytes_max,
            kept=len(self._kept),
            encoded=self._encoded,
            hits=self._hits,
        )
