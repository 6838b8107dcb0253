"""Content parts of messages: find text, images and videos, and adapt them to what a chat template reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from worker.input.prompts.boundaries import Messages
from worker.input.prompts.template import Render

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")


def kinds_in(messages: Messages) -> list[Kind]:
    """Return the kinds of a conversation's images and videos, in order."""
    contents = [message.get("content") for message in messages]
    types = [part.get("type") for parts in contents if isinstance(parts, list) for part in parts]
    return [kind for kind in types if kind in KINDS]


def texts_of(messages: Messages) -> list[str]:
    """Return all texts of the messages."""
    texts: list[Any] = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return texts


def with_marks(render: Render, mark: str) -> Render:
    """Adapt a template that reads contents as text: an image becomes a marker on a line of its own."""

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
    """Move images of tool results and answers into a user message after them. Consecutive messages of one
    role, such as the results of one turn's calls, stay together."""
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
