"""Images for tests, valid and invalid."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from PIL import Image

FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
}
MP4 = b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isommp41" + bytes(64)
"""The beginning of a video, enough to detect its media type."""


def picture(colour: str = "red", size: tuple[int, int] = (8, 6), kind: str = "PNG", **told: Any) -> bytes:
    file = BytesIO()
    Image.new("RGB", size, colour).save(file, kind, **told)
    return file.getvalue()


def noise(size: tuple[int, int], kind: str = "PNG") -> bytes:
    file = BytesIO()
    Image.effect_noise(size, 80).save(file, kind)
    return file.getvalue()


def animation(kind: str) -> bytes:
    """Return an animation of two frames, as a GIF, a PNG or a WEBP."""
    file, (first, *others) = BytesIO(), [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    first.save(file, kind, save_all=True, append_images=others, duration=100)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG whose header declares this size and that has no pixels."""

    return png(width, height, [(b"IDAT", zlib.compress(b""))])


def bomb() -> bytes:
    """Return a valid decompression bomb: 10,000 by 10,000 pixels of one bit in a few kilobytes."""
    return png(10_000, 10_000, [(b"IDAT", zlib.compress(bytes(10_000 * (1 + 10_000 // 8))))])


def png(
    width: int, height: int, chunks: Sequence[tuple[bytes, bytes]], depth: int = 1, colour: int = 0
) -> bytes:
    """Return a PNG of a header, `chunks` and an end chunk; black and white by default."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    told = [(b"IHDR", header), *chunks, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in told)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{b64encode(data).decode()}"
