"""Image containers without what no decoder needs: comments, colour profiles, thumbnails, broken metadata.

Pillow parses all metadata and fails on what is broken in it, which every viewer passes over. So an image is
rewritten to the parts that make its pixels, with checksums made anew, and its EXIF orientation is read here.
A part that is broken itself is left for the decoder to refuse.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

PARTS_MAX = 2**17
"""Maximum number of parts of a file."""

_SCAN_END = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]", re.DOTALL)
"""The next marker behind a JPEG's entropy-coded data, which has stuffed zeros and restart markers."""
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's SOF markers."""
_SEQUENTIAL = frozenset((0xC0, 0xC1, 0xC9))
_TRANSPARENCY_BYTES = {0: (2, 2), 2: (6, 6), 3: (1, 256)}
"""Valid sizes of a PNG's tRNS chunk, by colour type."""


@dataclass(frozen=True, slots=True)
class BareImage:
    """An image file without metadata. `orientation`: 1 to 8, as in EXIF. `is_whole`: of a JPEG, all its
    coefficients are decoded before its first row, not row by row."""

    data: bytes
    orientation: int = 1
    is_animated: bool = False
    is_whole: bool = False


def without_metadata(data: bytes) -> BareImage:
    """Return an image file without metadata. Raises `ValueError`, `struct.error` or `IndexError` for one that
    is broken so that its parts cannot be told apart."""
    for magic, strip in _STRIPPERS.items():
        if data.startswith(magic):
            return strip(data)
    return BareImage(data)


def orientation(exif: bytes) -> int:
    """Return the orientation of an EXIF block; 1 if it has none, or none that is valid."""
    exif = exif.removeprefix(b"Exif\x00\x00")
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    try:
        if order is None:
            return 1
        (place,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, place)
        for entry in range(place + 2, place + 2 + 12 * count, 12):
            tag, kind, _ = struct.unpack_from(f"{order}HHI", exif, entry)
            if tag == 0x0112:
                (value,) = struct.unpack_from(order + ("I" if kind == 4 else "H"), exif, entry + 8)
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _parts() -> Iterator[None]:
    for _ in range(PARTS_MAX):
        yield
    raise ValueError("the file has too many parts")


def _png(data: bytes) -> BareImage:
    written, place, colour, turn, frames = [data[:8]], 8, -1, 1, 1
    for _ in _parts():
        if place + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, place)
        body = data[place + 8 : place + 8 + length]
        place += 12 + length
        if kind == b"IEND":
            break
        if kind == b"IHDR":
            colour = body[9]
        least, most = _TRANSPARENCY_BYTES.get(colour, (1, 0))
        if kind == b"acTL" and length == 8:
            frames = int.from_bytes(body[:4])
        if kind == b"eXIf":
            turn = orientation(body)
        elif kind[:1].isupper() or (kind == b"tRNS" and least <= len(body) <= most):
            written.append(_png_chunk(kind, body))
    return BareImage(b"".join([*written, _png_chunk(b"IEND", b"")]), turn, is_animated=frames > 1)


def _png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(body, zlib.crc32(kind)))


def _jpeg(data: bytes) -> BareImage:
    """Return a JPEG up to its first end. A progressive one without gets one if its first scan is whole: the
    others only add detail. The rest stay without, so that the decoder counts their rows."""
    written, place, turn, scans, is_progressive = [data[:2]], 2, 1, 0, False
    components, is_whole = 0, False
    for _ in _parts():
        place = data.find(b"\xff", place)
        if place < 0 or (place + 4 > len(data) and data[place + 1 : place + 2] != b"\xd9"):
            break
        marker = data[place + 1]
        if marker == 0xD9:
            return BareImage(b"".join([*written, b"\xff\xd9"]), turn, is_whole=is_whole)
        if marker == 0xFF or marker in (0x00, 0x01, *range(0xD0, 0xD9)):
            place += 1 if marker == 0xFF else 2
            continue
        end = place + 2 + max(2, struct.unpack_from(">H", data, place + 2)[0])
        segment = data[place:end]
        is_progressive |= marker in (0xC2, 0xCA)
        if marker in _FRAME_HEADERS:
            components = segment[9]
            is_whole |= marker not in _SEQUENTIAL
        if marker == 0xDA:
            scans += 1
            is_whole |= segment[4] != components
            found = _SCAN_END.search(data, end)
            end = found.start() if found else len(data)
            segment = data[place:end]
        if marker == 0xE1 and segment[4:8] == b"Exif" and turn == 1:
            turn = orientation(segment[4:])
        if _is_needed(marker, segment):
            written.append(segment)
        place = end
    end_marker = b"\xff\xd9" if is_progressive and scans > 1 else b""
    return BareImage(b"".join([*written, end_marker]), turn, is_whole=is_whole)


def _is_needed(marker: int, segment: bytes) -> bool:
    """Return whether a JPEG's segment takes part in decoding. JFIF's and Adobe's state the colour space."""
    if marker == 0xE0:
        return segment[4:8] == b"JFIF" and len(segment) >= 18
    if marker == 0xEE:
        return segment[4:9] == b"Adobe" and len(segment) >= 16
    return marker != 0xFE and not 0xE0 <= marker <= 0xEF


def _webp(data: bytes) -> BareImage:
    written, place, turn, frames = list[bytes](), 12, 1, 0
    for _ in _parts():
        if place + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, place)
        body = data[place + 8 : place + 8 + length]
        place += 8 + length + length % 2
        if kind == b"EXIF":
            turn = orientation(body)
        if kind == b"VP8X":  # of its flags, those for transparency and animation stay
            body = bytes([body[0] & 0x12]) + body[1:]
        frames += kind == b"ANMF"
        if kind in (b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF"):
            written.append(struct.pack("<4sI", kind, len(body)) + body + bytes(len(body) % 2))
    image = b"WEBP" + b"".join(written)
    return BareImage(struct.pack("<4sI", b"RIFF", len(image)) + image, turn, is_animated=frames > 1)


def _gif(data: bytes) -> BareImage:
    """Return a GIF's first image, with the extension that names its transparent colour."""
    place = 13 + _colour_bytes(data[10])
    written, parts, images = [data[:place]], _parts(), 0
    for _ in parts:
        kind = data[place : place + 2]
        start, place = place, place + 2
        if kind[:1] == b",":
            images += 1
            if images > 1:
                break
            place = start + 11 + _colour_bytes(data[start + 9])
        elif kind[:1] != b"!":
            break
        while place < len(data) and data[place]:
            place += 1 + data[place]
            next(parts)
        place += 1
        if kind[:1] == b"," or (kind == b"!\xf9" and data[start + 2] == 4 and not images):
            written.append(data[start:place])
    return BareImage(b"".join([*written, b";"]), is_animated=images > 1)


def _colour_bytes(packed: int) -> int:
    return 3 << ((packed & 7) + 1) if packed & 0x80 else 0


_STRIPPERS: Mapping[bytes, Callable[[bytes], BareImage]] = {
    b"\x89PNG\r\n\x1a\n": _png,
    b"\xff\xd8\xff": _jpeg,
    b"RIFF": _webp,
    b"GIF8": _gif,
}
