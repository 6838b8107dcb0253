"""Decode images to RGB pixels for a model's processor."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image, ImageOps

from protocol.errors import Code, RequestError
from protocol.types import Media
from protocol.wire import MEDIA_PIXELS_MAX

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def open_image(data: bytes, media: Media) -> Image.Image:
    """Decode an image to RGB: upright, transparency on white, at most `media.pixels_max` pixels.

    Of an animation, only the first frame. Raises `RequestError(invalid_media)` if it cannot be decoded.
    """
    with reading(media), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about broken metadata of intact images
        file = Image.open(io.BytesIO(data), formats=_FORMATS)
        _check_size(file, media)
        file.load()
        image = _flat(ImageOps.exif_transpose(file))
    return within(image, media.pixels_max)


@contextmanager
def reading(media: Media) -> Iterator[None]:
    """Context manager that turns every exception into `RequestError(invalid_media)`: the file is at fault."""
    try:
        yield
    except RequestError:
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
