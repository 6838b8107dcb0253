"""Chat REPL: a conversation in the terminal until the user quits, its messages in the format of the API."""

from __future__ import annotations

import base64
import contextlib
import mimetypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from deploy.console import answer, chat_input, http

HISTORY_LINES_MAX = 1000

ReadLine = Callable[[str], str]
"""(prompt) -> the typed line. Raises `EOFError` at the end, or `KeyboardInterrupt`."""

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


@dataclass(slots=True)
class ChatRepl:
    """A chat session. `fields`: further fields of each request. `images`: data URLs for the next message."""

    client: httpx.Client
    console: Console
    model: str
    conversation: Conversation = field(default_factory=Conversation)
    fields: dict[str, Any] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    thought: str = ""

    def run(self, read_line: ReadLine) -> None:
        """Run until the end of input or /quit."""
        lines = chat_input.LineAssembler()
        while True:
            try:
                text = lines.add(read_line("... " if lines.open else ">>> "))
            except EOFError:
                return
            except KeyboardInterrupt:
                lines.clear()
                self.console.print()
                continue
            if text is not None and text.strip() and not self._ask(text):
                return

    def say(self, text: str, images: Sequence[Path] = (), *, draw: bool) -> answer.Answer:
        """Send a message and print its answer. Raises `ConsoleError` or `ImageError`."""
        urls = [*self.images, *map(read_image, images)]
        self.conversation.ask(text, urls)
        self.images.clear()
        return self._answer(draw=draw)

    def _answer(self, *, draw: bool) -> answer.Answer:
        body = {"model": self.model, "messages": self.conversation.told(), **self.fields}
        pieces = http.stream(self.client, body)
        with contextlib.closing(pieces):
            found = (answer.drawn if draw else answer.plain)(self.console, pieces)
        if found.text or not found.stopped:
            self.conversation.answered(found.text)
        self.thought = found.thought
        return found

    def _ask(self, text: str) -> bool:
        """Handle a text; return False on /quit."""
        with self._request_errors():
            match chat_input.read(text):
                case chat_input.ChatMessage(words, images):
                    self.say(words, images, draw=True)
                case chat_input.InvalidInput(why):
                    self.console.print(why, style="yellow", markup=False)
                case chat_input.ChatCommand("quit"):
                    return False
                case chat_input.ChatCommand() as order:
                    self._run_command(order)
        return True

    @contextlib.contextmanager
    def _request_errors(self) -> Iterator[None]:
        """Print an error instead of ending the session."""
        try:
            yield
        except (http.ConsoleError, ImageError) as error:
            self.console.print(str(error), style="red", markup=False)
            if self.conversation.is_open:
                self.console.print("/again sends it again", style="dim")

    def _run_command(self, order: chat_input.ChatCommand) -> None:
        match order.verb:
            case "new":
                self.conversation.forget()
                self.images.clear()
            case "again" if self.conversation.take_back():
                self._answer(draw=True)
            case "again":
                self.console.print("there is no question to send again", style="yellow")
            case "image":
                self.images.append(read_image(Path(order.rest)))
            case "system":
                self.conversation.system = order.rest
            case "model":
                self.model = order.rest or self.model
                self.console.print(self.model, style="dim", markup=False)
            case "thought":
                self.console.print(self.thought or "no reasoning", style="dim", markup=False)
            case _:
                self.console.print(chat_input.HELP, style="dim", markup=False)


@contextlib.contextmanager
def lines_with_history(path: Path | None) -> Iterator[ReadLine]:
    """Provide a line editor with history. `path`: a file that only its owner can read; None: no history."""
    import readline

    readline.set_history_length(HISTORY_LINES_MAX)
    if path is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    try:
        yield input
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
                path.chmod(0o600)
                readline.write_history_file(path)
