"""Messages of a chat in the API's format, as plain values, with images as data URLs."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IMAGE_BYTES_MAX = 16 * 2**20

Message = dict[str, Any]


class ImageError(ValueError):
    """A file that cannot be sent as an image; the message says why."""


@dataclass(slots=True)
class Conversation:
    """A conversation. `messages`: all except the system prompt. An unanswered user message is the last."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def ask(self, text: str, images: Sequence[str] = ()) -> None:
        """Add a user message with images as data URLs. It replaces an unanswered one."""
        if self.is_open:
            self.messages.pop()
        if not images:
            self.messages.append({"role": "user", "content": text})
            return
        parts: list[Message] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        self.messages.append({"role": "user", "content": [*parts, {"type": "text", "text": text}]})

    def answered(self, text: str) -> None:
        """Add the answer, or the part of it that was received."""
        self.messages.append({"role": "assistant", "content": text})

    @property
    def is_open(self) -> bool:
        """Whether the last message is an unanswered one of the user."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def take_back(self) -> bool:
        """Remove the last answer, to generate it again. Return whether a message is unanswered."""
        if self.messages and not self.is_open:
            self.messages.pop()
        return self.is_open

    def forget(self) -> None:
        """Start a new conversation with the same system prompt."""
        self.messages.clear()

    def told(self) -> list[Message]:
        """Return the messages of a request."""
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]


def read_image(path: Path) -> str:
    """Return an image file as a data URL. Raises `ImageError`."""
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith("image/"):
        raise ImageError(f"{path} does not have the suffix of an image file")
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > IMAGE_BYTES_MAX:
        raise ImageError(f"{path} is too large: {len(data)} bytes, the maximum is {IMAGE_BYTES_MAX}")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
