"""How large an image is, and whether it moves, by its header. Nothing is decoded, nothing is inflated.

Pillow tells the same, and for a PNG of 48 kB whose notes are compressed it takes half a second: a header may
have as many parts as its file has bytes. Here each is stepped over, and there is a limit of steps. A decoder
has the last word on what is broken.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

STEPS_MAX = 2**17
"""As many blocks as a GIF of 32 MiB has."""

_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of frames, which tell the size: all SOF."""
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))
"""Those that nothing belongs to."""
_SCAN = 0xDA


class HeaderError(ValueError):
    """It is not what its first bytes promise."""


@dataclass(frozen=True, slots=True)
class Header:
    """In pixels."""

    width: int
    height: int
    is_animated: bool = False


def read_header(mime: str, data: bytes) -> Header:
    """Of an image of one of the types in `READERS`. Raises HeaderError."""
    try:
        header = READERS[mime](data)
    except (struct.error, IndexError, ValueError) as error:
        raise HeaderError("it ends too soon, or has too many parts") from error
    if header.width < 1 or header.height < 1:
        raise HeaderError("it has no pixels")
    return header


def _steps() -> Iterator[None]:
    for _ in range(STEPS_MAX):
        yield
    raise HeaderError("it has too many parts")


def _png(data: bytes) -> Header:
    place, sizes, frames = 8, [(0, 0)], 1
    for _ in _steps():
        length, kind, first, second = struct.unpack_from(">I4sII", data, place)
        match kind:
            case b"IDAT":
                break
            case b"IHDR":
                sizes.append((first, second))
            case b"acTL":
                frames = first
        place += 12 + length
    return Header(*max(sizes, key=math.prod), frames > 1)


def _jpeg(data: bytes) -> Header:
    place, sizes = 2, [(0, 0)]
    for _ in _steps():
        place = data.index(0xFF, place)  # decoders step over what is between
        marker = data[place + 1]
        if marker == _SCAN:
            break
        if marker in _SIZES:
            height, width = struct.unpack_from(">HH", data, place + 5)
            sizes.append((width, height))
        if marker == 0xFF:  # fill
            place += 1
        else:
            place += 2 if marker in _BARE else 2 + max(2, struct.unpack_from(">H", data, place + 2)[0])
    return Header(*max(sizes, key=math.prod))


def _gif(data: bytes) -> Header:
    width, height, packed = struct.unpack_from("<HHB", data, 6)
    place, images, steps = 13 + _colours(packed), 0, _steps()
    for _ in steps:
        block = data[place : place + 1]
        if block == b",":
            images += 1
            if images > 1:
                break
            left, top, wide, high, packed = struct.unpack_from("<HHHHB", data, place + 1)
            width, height = max(width, left + wide), max(height, top + high)
            place = _behind_blocks(data, place + 11 + _colours(packed), steps)
        elif block == b"!":
            place = _behind_blocks(data, place + 2, steps)
        else:
            break
    if not images:
        raise HeaderError("there is no image in it")
    return Header(width, height, images > 1)


def _colours(packed: int) -> int:
    """Bytes of a table of colours."""
    return 3 << ((packed & 7) + 1) if packed & 0x80 else 0


def _behind_blocks(data: bytes, place: int, steps: Iterator[None]) -> int:
    """Where a row of blocks has ended; or the data has, as in a file that is cut."""
    while place < len(data) and (length := data[place]):
        place += 1 + length
        next(steps)
    return place + 1


def _webp(data: bytes) -> Header:
    kind, _, body = struct.unpack_from("<4sI10s", data, 12)
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(body[at : at + 3], "little") for at in (4, 7))
        return Header(width, height, bool(body[0] & 2) and _has_frames(data))
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return Header(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", body, 6)
        return Header(width & 0x3FFF, height & 0x3FFF)
    raise HeaderError("it does not tell its size")


def _has_frames(data: bytes) -> bool:
    """More than one."""
    place, frames = 12, 0
    for _ in _steps():
        if place + 8 > len(data) or frames > 1:
            break
        kind, length = struct.unpack_from("<4sI", data, place)
        frames += kind == b"ANMF"
        place += 8 + length + length % 2
    return frames > 1


def _bmp(data: bytes) -> Header:
    (length,) = struct.unpack_from("<I", data, 14)
    if length == 12:
        return Header(*struct.unpack_from("<HH", data, 18))
    width, height = struct.unpack_from("<ii", data, 18)
    return Header(width, abs(height))


READERS: Mapping[str, Callable[[bytes], Header]] = {
    "image/png": _png,
    "image/jpeg": _jpeg,
    "image/webp": _webp,
    "image/gif": _gif,
    "image/bmp": _bmp,
}
