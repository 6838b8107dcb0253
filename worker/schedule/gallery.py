"""Which encoded images are kept, and which prompt waits for one. Pure: it decides, the engine keeps.

An image is *needed* while a row in prefill has a part of it to run. What must always hold: what is kept takes
at most `bytes_max`, or is a single image that has turned out larger than was estimated; a needed image is
forgotten only where another one finds no room otherwise. Nobody pins anything, so no row can leave a pin
behind: what is needed is asked when room is made.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Set
from dataclasses import replace

from protocol.errors import Code, RequestError
from protocol.parts import ImageStatus
from worker.contract import Prepared
from worker.pictures import Picture
from worker.schedule.rows import Chunk, Row


def pictures_of(request: Prepared) -> tuple[Picture, ...]:
    """A request's images, under digests that requests of another salt do not share: how long an answer takes
    must not tell whether somebody has asked about the same image."""
    if not request.salt:
        return request.pictures
    return tuple(
        replace(picture, digest=_salted(picture.digest, request.salt)) for picture in request.pictures
    )


def _salted(digest: str, salt: str) -> str:
    return hashlib.sha256(f"{digest}/{salt}".encode("utf-8", "surrogatepass")).hexdigest()


def _needed(rows: Iterable[Row]) -> Set[str]:
    return {picture.digest for row in rows for picture in row.pictures if picture.end > row.prefilled}


class Gallery:
    """The images that are kept, the least recently used first. `bytes_max`: None, as many as there are."""

    def __init__(self, bytes_max: int | None) -> None:
        self._bytes_max = sys.maxsize if bytes_max is None else bytes_max
        self._kept: dict[str, int] = {}
        self._encoded = 0
        self._hits = 0

    @property
    def bytes(self) -> int:
        return sum(self._kept.values())

    def check(self, request: Prepared) -> None:
        """Raises `RequestError` for a request with an image that could not be kept even alone."""
        most = max((picture.nbytes for picture in request.pictures), default=0)
        if most > self._bytes_max:
            message = (
                f"An image of this request takes {most} bytes once it is encoded, and this server has "
                f"{self._bytes_max} for images. Please send a smaller one."
            )
            raise RequestError(Code.CONTEXT_LENGTH_EXCEEDED, message, param=request.source)

    # --- what rows need ---

    def missing(self, row: Row, begin: int) -> Picture | None:
        """The first image that a row has to run from position `begin` on and that is not kept."""
        for picture in row.pictures:
            if picture.end > begin and picture.digest not in self._kept:
                return picture
        return None

    def reach(self, row: Row, begin: int) -> int:
        """The position up to which a row can be run from `begin` on; `begin` where an image has to be encoded
        first."""
        picture = self.missing(row, begin)
        return len(row.tokens) - 1 if picture is None else max(begin, picture.first)

    # --- what has happened ---

    def make_room(self, nbytes: int, rows: Iterable[Row]) -> list[str]:
        """What has to be forgotten before an image of so many bytes comes: digests. `rows`: in prefill; what
        they need goes last."""
        needed = _needed(rows)
        return self._forget(sorted(self._kept, key=needed.__contains__), self._bytes_max - nbytes)

    def encoded(self, row: Row, picture: Picture, nbytes: int) -> list[str]:
        """An image was encoded for the sake of `row`, and so many bytes are kept of it. What has to be
        forgotten, if these are more than was thought."""
        self._encoded += 1
        row.looked.add(picture.digest)
        others = [digest for digest in self._kept if digest != picture.digest]
        self._kept[picture.digest] = nbytes
        return self._forget(others, self._bytes_max)

    def ran(self, chunk: Chunk) -> None:
        """A chunk was run. To be told before its row knows."""
        begin, end = chunk.begin, chunk.begin + len(chunk.tokens)
        for picture in chunk.row.pictures:
            if max(begin, picture.first) < min(end, picture.end):
                self._kept[picture.digest] = self._kept.pop(picture.digest)
                self._count(chunk.row, picture)

    def _count(self, row: Row, picture: Picture) -> None:
        """Once for each image of a prompt, whatever the chunks."""
        if picture.first >= row.viewed:
            row.viewed = picture.end
            self._hits += picture.digest not in row.looked
            row.looked.discard(picture.digest)

    def clear(self, rows: Iterable[Row]) -> tuple[list[str], int]:
        """Forget all that rows in prefill do not need: the digests, and the bytes given back."""
        before, needed = self.bytes, _needed(rows)
        gone = self._forget([digest for digest in self._kept if digest not in needed], 0)
        return gone, before - self.bytes

    def _forget(self, digests: Iterable[str], bytes_max: int) -> list[str]:
        """In this order, until no more than so many bytes are kept."""
        gone: list[str] = []
        for digest in digests:
            if self.bytes <= bytes_max:
                break
            del self._kept[digest]
            gone.append(digest)
        return gone

    def status(self) -> ImageStatus:
        """Sizes, and counts since the start."""
        return ImageStatus(
            bytes=self.bytes,
            bytes_max=self._bytes_max,
            kept=len(self._kept),
            encoded=self._encoded,
            hits=self._hits,
        )
