"""Decode images to RGB pixels for a model's processor."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import ExifTags, Image, ImageOps

from protocol.errors import Code, RequestError
from protocol.types import Media
from protocol.wire import MEDIA_PIXELS_MAX
from worker.contract.preparation import PreparationCancelled

DECODED_PIXELS_MAX = 2**24
"""Size to which a larger image is reduced while it is decoded, by a whole number. No model is given more."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_STRIP_ROWS = 64
_TOLERANCE = 0.01


def open_image(data: bytes, media: Media) -> Image.Image:
    """Decode an image to RGB: upright, transparency on white, at most `media.pixels_max` pixels.

    Of an animation, only the first frame. Beyond `DECODED_PIXELS_MAX` there is never a second copy of all
    pixels. Raises `RequestError(invalid_media)` if it cannot be decoded.
    """
    with reading(media), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about broken metadata of intact images
        file = Image.open(io.BytesIO(data), formats=_FORMATS)
        _check_size(file, media)
        # JPEG decoders can reduce by themselves.
        if (factor := _factor(file)) > 1:
            file.draft(None, (file.width // factor, file.height // factor))
        file.load()
        factor = _factor(file)
        image = _flat(ImageOps.exif_transpose(file)) if factor == 1 else _reduced(file, factor)
    return within(image, media.pixels_max)


def _factor(image: Image.Image) -> int:
    """Return the whole number by which both sides of an image must be divided."""
    return max(1, math.ceil(math.sqrt(image.width * image.height / DECODED_PIXELS_MAX) - _TOLERANCE))


def _reduced(image: Image.Image, factor: int) -> Image.Image:
    """Return a decoded image in RGB, upright and divided by `factor`, made strip by strip."""
    width, height = image.size
    reduced = Image.new("RGB", (-(-width // factor), -(-height // factor)))
    for top in range(0, height, factor * _STRIP_ROWS):
        strip = image.crop((0, top, width, min(height, top + factor * _STRIP_ROWS)))
        reduced.paste(_flat(strip).reduce(factor), (0, top // factor))
    orientation = ExifTags.Base.Orientation
    reduced.getexif()[orientation] = image.getexif().get(orientation, 1)
    ImageOps.exif_transpose(reduced, in_place=True)
    return reduced


@contextmanager
def reading(media: Media) -> Iterator[None]:
    """Context manager that turns every exception into `RequestError(invalid_media)`: the file is at fault."""
    try:
        yield
    except (RequestError, PreparationCancelled):
        raise
    except Exception as error:  # Pillow's decoders and upstream's processors raise anything
        raise unreadable(media, " ".join(str(error).split()) or type(error).__name__) from error


def unreadable(media: Media, reason: str) -> RequestError:
    """Return the error for a file that holds no image, or none that the model accepts."""
    kind = media.mime.partition("/")[0] if media.mime.startswith("video/") else "image"
    message = f"The {kind} cannot be read: {reason}."
    return RequestError(Code.INVALID_MEDIA, message, param=media.param or "messages")


def _check_size(image: Image.Image, media: Media) -> None:
    width, height = image.size
    if width * height > MEDIA_PIXELS_MAX:
        raise unreadable(media, f"{width} × {height} is more than {MEDIA_PIXELS_MAX} pixels")


def _flat(image: Image.Image) -> Image.Image:
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
