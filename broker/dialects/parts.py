"""Content parts of a message: read as clients send them, and written as chat templates expect them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import msgspec

from broker.dialects.attached_files import FileData, file_text, unsupported_part

Detail = Literal["low", "high", "auto", "original"]


@dataclass(frozen=True, slots=True)
class Image:
    """Image by its URL, as sent. `param`: its place for error messages, such as `messages[2].content[0]`.
    `detail`: OpenAI's level of detail; empty: the server's choice."""

    url: str
    param: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Video:
    """Video by the URL of its file, or, with `in_frames`, by the URLs of its frames as images."""

    urls: tuple[str, ...]
    param: str
    in_frames: bool = False


class Placeholder(Enum):
    """Placeholder of an attachment that was extracted before."""

    IMAGE = "image"
    VIDEO = "video"


Attachment = Image | Video
Part = str | Attachment | Placeholder
"""Text, an attachment still to be extracted, or the placeholder of an extracted one."""


def read(part: Mapping[str, Any], param: str) -> Part:
    """Read a part that its dialect has checked. `param`: its place. Raises `RequestError` for a file
    that is no text, and ValueError for an unknown type."""
    # The place in the client's own body, if the dialect converted these messages from another format.
    place = part.get("param") or param
    match part["type"]:
        case "text" | "input_text" | "output_text":
            return part.get("text") or ""
        case "refusal":
            return part.get("refusal") or ""
        case "image_url" | "input_image":
            url, detail = _url_and_detail(part["image_url"])
            return Image(url, place, detail or part.get("detail") or "")
        case "file":
            return file_text(msgspec.convert(part["file"], FileData), f"{place}.file")
        case "input_audio" | "audio_url" as kind:
            raise unsupported_part(kind, place)
        case "video_url":
            url, _ = _url_and_detail(part["video_url"])
            return Video((url,), place)
        case "video" if "video" in part:
            video = part["video"]
            if isinstance(video, str):
                return Video((video,), place)
            return Video(tuple(video), place, in_frames=True)
        case "image" | "video" as kind:
            return Placeholder(kind)
        case unknown:
            raise ValueError(f"'{param}' has unknown type {unknown!r}.")


def _url_and_detail(source: str | Mapping[str, Any]) -> tuple[str, str]:
    return (source, "") if isinstance(source, str) else (source["url"], source.get("detail") or "")


def write(part: Part) -> dict[str, str]:
    """Return the part as a chat template expects it."""
    match part:
        case Image() | Placeholder.IMAGE:
            return {"type": "image"}
        case Video() | Placeholder.VIDEO:
            return {"type": "video"}
        case text:
            return {"type": "text", "text": text}
