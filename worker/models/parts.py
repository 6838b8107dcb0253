"""Conversations with images: what of a message is text and what is seen, and where templates read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from worker.models.boundaries import Messages
from worker.models.template import Render

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")


def kinds_in(messages: Messages) -> list[Kind]:
    """The images and videos of a conversation, in order."""
    contents = [message.get("content") for message in messages]
    types = [part.get("type") for parts in contents if isinstance(parts, list) for part in parts]
    return [kind for kind in types if kind in KINDS]


def texts_of(messages: Messages) -> list[str]:
    """All that somebody has written into them."""
    texts: list[Any] = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return texts


def with_marks(render: Render, mark: str) -> Render:
    """For templates that read contents as text: an image is a mark on a line of its own."""

    def flatten(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = (f"{mark}\n" if part.get("type") == "image" else part.get("text", "") for part in content)
        return "".join(texts)

    def render_flat(messages: Messages, **options: Any) -> Any:
        flat = [{**message, "content": flatten(message.get("content"))} for message in messages]
        return render(flat, **options)

    return render_flat


def with_images_behind(messages: Messages) -> list[Mapping[str, Any]]:
    """The same conversation where images are only a user's: those of others stand behind their messages, in a
    user's of their own. Results of one turn's calls stay together."""
    shown: list[Mapping[str, Any]] = []
    images: list[Mapping[str, Any]] = []
    for message, following in zip(messages, [*messages[1:], {}], strict=True):
        content = message.get("content")
        if message.get("role") != "user" and isinstance(content, list):
            images += [part for part in content if part.get("type") in KINDS]
            texts = [part.get("text", "") for part in content if part.get("type") not in KINDS]
            message = {**message, "content": "".join(texts)}
        shown.append(message)
        if images and following.get("role") != message.get("role"):
            shown.append({"role": "user", "content": images})
            images = []
    return shown
