"""A conversation in a terminal: lines in, answers out, until somebody has said enough."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from deploy.console import answer, http, typed
from deploy.console.conversation import Conversation, ImageError, read_image

HISTORY_LINES_MAX = 1000

ReadLine = Callable[[str], str]
"""(prompt) -> what was typed. Raises `EOFError` at the end, `KeyboardInterrupt`."""


@dataclass(slots=True)
class Talk:
    """`fields`: what else each request says. `images`: data URLs that go with the next words."""

    client: httpx.Client
    console: Console
    model: str
    conversation: Conversation = field(default_factory=Conversation)
    fields: dict[str, Any] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    thought: str = ""

    def run(self, read_line: ReadLine) -> None:
        """Until the end of what is typed, or /quit."""
        lines = typed.Lines()
        while True:
            try:
                text = lines.add(read_line("... " if lines.open else ">>> "))
            except EOFError:
                return
            except KeyboardInterrupt:
                lines.clear()
                self.console.print()
                continue
            if text is not None and text.strip() and not self._heard(text):
                return

    def say(self, text: str, images: Sequence[Path] = (), *, draw: bool) -> answer.Answer:
        """One question and its answer. Raises `ConsoleError` or `ImageError`."""
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

    def _heard(self, text: str) -> bool:
        """False: enough was said."""
        with self._complaints():
            match typed.read(text):
                case typed.Said(words, images):
                    self.say(words, images, draw=True)
                case typed.Wrong(why):
                    self.console.print(why, style="yellow", markup=False)
                case typed.Order("quit"):
                    return False
                case typed.Order() as order:
                    self._obey(order)
        return True

    @contextlib.contextmanager
    def _complaints(self) -> Iterator[None]:
        """What goes wrong with one question is said, and the next may be asked."""
        try:
            yield
        except (http.ConsoleError, ImageError) as error:
            self.console.print(str(error), style="red", markup=False)
            if self.conversation.is_open:
                self.console.print("/again asks once more", style="dim")

    def _obey(self, order: typed.Order) -> None:
        match order.verb:
            case "new":
                self.conversation.forget()
                self.images.clear()
            case "again" if self.conversation.take_back():
                self._answer(draw=True)
            case "again":
                self.console.print("nothing was asked", style="yellow")
            case "image":
                self.images.append(read_image(Path(order.rest)))
            case "system":
                self.conversation.system = order.rest
            case "model":
                self.model = order.rest or self.model
                self.console.print(self.model, style="dim", markup=False)
            case "thought":
                self.console.print(self.thought or "nothing", style="dim", markup=False)
            case _:
                self.console.print(typed.HELP, style="dim", markup=False)


@contextlib.contextmanager
def lines_with_history(path: Path | None) -> Iterator[ReadLine]:
    """A line editor that knows what was typed before. The file is its owner's alone; None: it forgets."""
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
