"""What has been said so far, as an endpoint is told it. Plain values; images as data URLs."""

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
    """A file that cannot be sent as an image; says why."""


@dataclass(slots=True)
class Conversation:
    """`messages`: all of them, but for the system's. What has no answer yet is the last, and the user's."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def ask(self, text: str, images: Sequence[str] = ()) -> None:
        """What the user says, with images as data URLs; instead of what was not answered."""
        if self.is_open:
            self.messages.pop()
        if not images:
            self.messages.append({"role": "user", "content": text})
            return
        parts: list[Message] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        self.messages.append({"role": "user", "content": [*parts, {"type": "text", "text": text}]})

    def answered(self, text: str) -> None:
        """What was said to it, or as much as was waited for."""
        self.messages.append({"role": "assistant", "content": text})

    @property
    def is_open(self) -> bool:
        """The user has spoken last."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def take_back(self) -> bool:
        """Forget the last answer, to ask for another one. Whether there is anything to be answered."""
        if self.messages and not self.is_open:
            self.messages.pop()
        return self.is_open

    def forget(self) -> None:
        """Begin anew, under the same system prompt."""
        self.messages.clear()

    def told(self) -> list[Message]:
        """As a request has it."""
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]


def read_image(path: Path) -> str:
    """As a data URL. Raises `ImageError`."""
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith("image/"):
        raise ImageError(f"{path} is no image by its name")
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > IMAGE_BYTES_MAX:
        raise ImageError(f"{path} has {len(data)} bytes, and may have {IMAGE_BYTES_MAX}")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
