"""Words of the scripted engine for images and videos, made of their bytes; images are really decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from protocol.types import Media
from worker.input.media.images import open_image

DIGITS = 8
"""Number of hexadecimal digits of the digest in a word."""
_KINDS = ("image", "video")


def seen(messages: Sequence[Mapping[str, Any]], media: Sequence[Media], frames: Sequence[bytes]) -> list[str]:
    """Return a word for each of the media. Raises `RequestError` for one that cannot be decoded, and
    `ValueError` if they do not match the placeholders of the messages."""
    asked = [part["type"] for message in messages for part in _parts(message) if part["type"] in _KINDS]
    told = ["video" if _is_video(each) else "image" for each in media]
    if asked != told:
        raise ValueError(f"placeholders {asked}, but media {told}")
    return [word(each, frames[each.frame : each.frame + each.frames]) for each in media]


def word(media: Media, frames: Sequence[bytes]) -> str:
    digest = sha256(b"".join(frames)).hexdigest()
    if digest != media.sha256:
        raise ValueError(f"{media.param}: the bytes do not match the sha256")
    if not media.mime.startswith("video/"):
        for frame in frames:
            open_image(frame, media)
    frames_told = f"*{media.frames}" if media.frames > 1 else ""
    pixels_told = f"/{media.pixels_max}" if media.pixels_max else ""
    return f"{media.mime.partition('/')[2]}{frames_told}:{digest[:DIGITS]}{pixels_told}"


def _is_video(media: Media) -> bool:
    return media.frames > 1 or media.mime.startswith("video/")


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else ()
