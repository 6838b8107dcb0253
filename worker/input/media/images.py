"""Decode images to RGB pixels for a model's processor, from containers without what no decoder needs.

Pillow parses all metadata, such as comments, colour profiles and thumbnails, and fails on what is broken in
it, which every viewer passes over. So an image is rewritten to the parts that make its pixels, with checksums
made anew, and its EXIF orientation is read here. A part that is broken itself is left for the decoder to
refuse.
"""

from __future__ import annotations

import io
import logging
import math
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from protocol.errors import Code, RequestError
from protocol.types import Media
from worker.values import PreparationCancelled

IMAGE_PIXELS_MAX = 2**26
"""Largest image, by its header."""
DECODER_BYTES_MAX = 2**28
"""Largest memory that a decoder may take, by the header; a reduced copy has 64 MiB more."""
REQUEST_PIXELS_MAX = 2**29
"""Largest sum of pixels of one request's images that are decoded, which bounds the time for that."""
PIXEL_BYTES = {"PNG": 4, "WEBP": 16, "GIF": 1, "BMP": 4, "JPEG": 0}
"""Memory that Pillow's decoders take for a pixel, measured. A WebP is composed of two canvases and copied
twice. A JPEG is reduced while it is decoded."""
DECODED_PIXELS_MAX = 2**24
"""Size to which a larger image is reduced while it is decoded, by a whole number. No model is given more."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_STRIP_ROWS = 64
_TOLERANCE = 0.01
_ROWS_MIN = 15 / 16
"""Share of its rows that a truncated JPEG must have."""
_JPEG_ROWS_BEHIND = 32
"""Rows by which the decoder is behind its data when these end."""
_JPEG_END = b"\xff\xd9"
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF orientation, what makes an image upright."""
DAMAGED = "its file is damaged, or ends too early"
ANIMATED = "it is animated; send its frames as a video, or send a single frame"
TOO_LARGE = f"it has more than {IMAGE_PIXELS_MAX} pixels"
TOO_MUCH_MEMORY = (
    "to decode that many pixels of this kind takes too much memory; "
    f"a PNG or a baseline JPEG may have {IMAGE_PIXELS_MAX}"
)

log = logging.getLogger(__name__)

PARTS_MAX = 2**17
"""Maximum number of parts of a file."""

_SCAN_END = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]", re.DOTALL)
"""The next marker behind a JPEG's entropy-coded data, which has stuffed zeros and restart markers."""
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's SOF markers."""
_SEQUENTIAL = frozenset((0xC0, 0xC1, 0xC9))
_TRANSPARENCY_BYTES = {0: (2, 2), 2: (6, 6), 3: (1, 256)}
"""Valid sizes of a PNG's tRNS chunk, by colour type."""


class _TruncatedJpeg(Exception):
    """Raised for a JPEG without an end that has enough of its rows; with an end, the decoder fills them."""


class PixelBudget:
    """Pixels that may still be decoded for one request."""

    def __init__(self) -> None:
        self._left = REQUEST_PIXELS_MAX

    def spend(self, pixels: int, media: Media) -> None:
        """Take the pixels of an image. Raises `RequestError` if there are not as many left."""
        self._left -= pixels
        if self._left < 0:
            message = f"The images of one request may have at most {REQUEST_PIXELS_MAX} pixels in total."
            raise RequestError(Code.INVALID_REQUEST, message, param=media.param or "messages")


def open_image(data: bytes, media: Media, budget: PixelBudget | None = None) -> Image.Image:
    """Decode an image to RGB: upright, transparency on white, at most `media.pixels_max` pixels.

    There is never a second copy of all pixels of a large image. `budget`: of its request; None: only the
    limits of one image hold. Raises `RequestError(invalid_media)` if it cannot be decoded.
    """
    with reading(media, DAMAGED), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bare = without_metadata(data)
        _check(bare, media, budget or PixelBudget())
        try:
            file = _decoded(bare.data)
        except _TruncatedJpeg:
            file = _decoded(bare.data + _JPEG_END)
        image = _flat(file, _factor(file))
        if bare.orientation in _TURNS:
            image = image.transpose(_TURNS[bare.orientation])
    return within(image, media.pixels_max)


def _check(image: BareImage, media: Media, budget: PixelBudget) -> None:
    """Check what the header says before any pixel is decoded. Raises `RequestError`."""
    if image.is_animated:
        raise unreadable(media, ANIMATED)
    try:
        file = Image.open(io.BytesIO(image.data), formats=_FORMATS)
    except Image.DecompressionBombError:  # Pillow's own limit is higher
        raise unreadable(media, TOO_LARGE) from None
    pixels = file.width * file.height
    if pixels > IMAGE_PIXELS_MAX:
        raise unreadable(media, f"{file.width} × {file.height} is more than {IMAGE_PIXELS_MAX} pixels")
    if _decoder_bytes(file, is_whole=image.is_whole) > DECODER_BYTES_MAX:
        raise unreadable(media, TOO_MUCH_MEMORY)
    budget.spend(pixels, media)


def _decoder_bytes(file: ImageFile, *, is_whole: bool) -> int:
    """Return the memory that decoding takes, beside a reduced copy. `is_whole`: as in `BareImage`."""
    if not isinstance(file, JpegImageFile) or not is_whole:
        return PIXEL_BYTES.get(file.format or "", 0) * file.width * file.height
    factors = [(wide, high) for _, wide, high, *_ in file.layer]
    widest, highest = (max(1, *each) for each in zip((1, 1), *factors, strict=True))
    samples = (
        (-(-file.width * wide // widest) + 7) * (-(-file.height * high // highest) + 7)
        for wide, high in factors
    )
    return int(2 * sum(samples))


def _decoded(data: bytes) -> Image.Image:
    """Return an image with its pixels as the file has them; a large JPEG is reduced while it is decoded."""
    file = Image.open(io.BytesIO(data), formats=_FORMATS)
    if (factor := _factor(file)) > 1:
        file.draft(None, (file.width // factor, file.height // factor))
    if file.format != "JPEG" or data.endswith(_JPEG_END):
        file.load()
        return file
    blank = (128,) * len(file.getbands())
    file.im = Image.new(file.mode, file.size, blank if len(blank) > 1 else 128).im
    try:
        file.load()
    except OSError:
        file.tile = []
        top = int(file.height * _ROWS_MIN) - _JPEG_ROWS_BEHIND
        row = file.crop((0, top, file.width, top + 1))
        if top > 0 and all(band.getextrema() == (128, 128) for band in row.split()):
            raise
        raise _TruncatedJpeg from None
    return file


def _factor(image: Image.Image) -> int:
    """Return the whole number by which both sides of an image must be divided."""
    return max(1, math.ceil(math.sqrt(image.width * image.height / DECODED_PIXELS_MAX) - _TOLERANCE))


def _flat(image: Image.Image, factor: int) -> Image.Image:
    """Return a decoded image in RGB on white, divided by `factor`, made strip by strip."""
    if factor == 1 and image.mode == "RGB" and not image.has_transparency_data:
        return image
    width, height = image.size
    reduced = Image.new("RGB", (-(-width // factor), -(-height // factor)))
    for top in range(0, height, factor * _STRIP_ROWS):
        strip = image.crop((0, top, width, min(height, top + factor * _STRIP_ROWS)))
        reduced.paste(_on_white(strip).reduce(factor), (0, top // factor))
    return reduced


@contextmanager
def reading(media: Media, reason: str) -> Iterator[None]:
    """Context manager that turns every exception into `RequestError(invalid_media)`: the file is at fault.

    `reason`: what clients are told, since the exceptions' texts are for those who know the library.
    """
    try:
        yield
    except (RequestError, PreparationCancelled):
        raise
    except Exception as error:  # Pillow's decoders and upstream's processors raise anything
        log.info("an image or a video of a request cannot be read: %s", " ".join(str(error).split())[:200])
        raise unreadable(media, reason) from error


def unreadable(media: Media, reason: str) -> RequestError:
    """Return the error for a file that holds no image, or none that the model accepts."""
    kind = media.mime.partition("/")[0] if media.mime.startswith("video/") else "image"
    message = f"The {kind} cannot be read: {reason}."
    return RequestError(Code.INVALID_MEDIA, message, param=media.param or "messages")


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # conversion would clip values above 255
        image = image.point(lambda value: value / 256).convert("L")
    if image.has_transparency_data:
        # Transparent pixels may have any colour; upstream shows it, viewers do not.
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return image.convert("RGB")


def within(image: Image.Image, pixels_max: int | None) -> Image.Image:
    """Return the image, scaled down if it has more than `pixels_max` pixels. None: no limit."""
    width, height = image.size
    if not pixels_max or width * height <= pixels_max:
        return image
    scale = math.sqrt(pixels_max / (width * height))
    wide, high = max(1, int(width * scale)), max(1, int(height * scale))
    # For very thin images one side is already 1 and cannot shrink.
    wide, high = max(1, min(wide, pixels_max // high)), max(1, min(high, pixels_max // wide))
    return image.resize((wide, high), Image.Resampling.BICUBIC)


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
