"""Decode images to RGB pixels for a model's processor."""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from protocol.errors import Code, RequestError
from protocol.types import Media
from worker.input.media.containers import BareImage, without_metadata
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
