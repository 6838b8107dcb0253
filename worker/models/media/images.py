"""Decode images to RGB pixels for a model's processor."""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

from protocol.errors import Code, RequestError
from protocol.types import Media
from protocol.wire import MEDIA_PIXELS_MAX
from worker.contract.preparation import PreparationCancelled
from worker.models.media.containers import without_metadata

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

log = logging.getLogger(__name__)


class _TruncatedJpeg(Exception):
    """Raised for a JPEG without an end that has enough of its rows; with an end, the decoder fills them."""


def open_image(data: bytes, media: Media) -> Image.Image:
    """Decode an image to RGB: upright, transparency on white, at most `media.pixels_max` pixels.

    Of an animation, only the first frame. There is never a second copy of all pixels of a large image. Raises
    `RequestError(invalid_media)` if it cannot be decoded.
    """
    with reading(media, DAMAGED), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bare = without_metadata(data)
        try:
            file = _decoded(bare.data, media)
        except _TruncatedJpeg:
            file = _decoded(bare.data + _JPEG_END, media)
        image = _flat(file, _factor(file))
        if bare.orientation in _TURNS:
            image = image.transpose(_TURNS[bare.orientation])
    return within(image, media.pixels_max)


def _decoded(data: bytes, media: Media) -> Image.Image:
    """Return an image with its pixels as the file has them; a large JPEG is reduced while it is decoded."""
    file = Image.open(io.BytesIO(data), formats=_FORMATS)
    _check_size(file, media)
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


def _check_size(image: Image.Image, media: Media) -> None:
    width, height = image.size
    if width * height > MEDIA_PIXELS_MAX:
        raise unreadable(media, f"{width} × {height} is more than {MEDIA_PIXELS_MAX} pixels")


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
