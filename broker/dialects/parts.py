"""The parts that a message's content is made of: as clients send them, and as a chat template gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

Detail = Literal["low", "high", "auto", "original"]


@dataclass(frozen=True, slots=True)
class Image:
    """A URL as the client sent it; `param` is where, for error messages: `messages[2].content[0]`. `detail`:
    how finely it is to be looked at, as OpenAI has it; empty: as the server likes."""

    url: str
    param: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Video:
    """The URL of a file, or with `in_frames` those of images."""

    urls: tuple[str, ...]
    param: str
    in_frames: bool = False


class Placeholder(Enum):
    """Of what was set aside before."""

    IMAGE = "image"
    VIDEO = "video"


Attachment = Image | Video
Part = str | Attachment | Placeholder
"""Text, what is still to be set aside, or the place of what was."""


def read(part: Mapping[str, Any], param: str) -> Part:
    """A part that its dialect has checked; `param`: where it stands. Raises ValueError for one of unknown
    type."""
    # Where the client has put it, if the dialect has made these messages of something else.
    place = part.get("param") or param
    match part["type"]:
        case "text" | "input_text" | "output_text":
            return part.get("text") or ""
        case "refusal":
            return part.get("refusal") or ""
        case "image_url" | "input_image":
            url, detail = _url_and_detail(part["image_url"])
            return Image(url, place, detail or part.get("detail") or "")
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
            raise ValueError(f"{param}: a content part of unknown type {unknown!r}")


def _url_and_detail(told: str | Mapping[str, Any]) -> tuple[str, str]:
    return (told, "") if isinstance(told, str) else (told["url"], told.get("detail") or "")


def write(part: Part) -> dict[str, str]:
    """As a template gets it."""
    match part:
        case Image() | Placeholder.IMAGE:
            return {"type": "image"}
        case Video() | Placeholder.VIDEO:
            return {"type": "video"}
        case text:
            return {"type": "text", "text": text}
