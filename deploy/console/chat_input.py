"""Parser of chat input: commands and messages. Pure, except for the check whether a file exists.

A line that ends in a backslash continues in the next one. A line with only a triple quote begins a text that
another one ends. Words that name image files add these images.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

QUOTE = '"""'
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")

Verb = Literal["help", "new", "again", "image", "system", "model", "thought", "quit"]
VERBS: tuple[Verb, ...] = get_args(Verb)

HELP = """\
/new            start a new conversation
/again          generate the last answer again
/image FILE     send an image with the next message; a message may also name files itself
/system TEXT    set the system prompt
/model NAME     continue with another model
/thought        show the reasoning of the last answer
/quit           or Ctrl-D

A line that ends in \\ continues in the next; \"\"\" begins and ends a text of several lines.
Ctrl-C ends an answer early."""


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A command with its argument."""

    verb: Verb
    rest: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message to send to the model."""

    text: str
    images: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class InvalidInput:
    """Invalid input, with the reason."""

    why: str


@dataclass(slots=True)
class LineAssembler:
    """Assembler of input lines. `open`: the text is incomplete."""

    _parts: list[str] = field(default_factory=list)
    _quoted: bool = False

    @property
    def open(self) -> bool:
        return self._quoted or bool(self._parts)

    def add(self, line: str) -> str | None:
        """Add a line; return the whole text once it is complete."""
        if line.strip() == QUOTE:
            self._quoted = not self._quoted
            return None if self._quoted else self._whole()
        if self._quoted:
            self._parts.append(line)
            return None
        if line.endswith("\\"):
            self._parts.append(line[:-1])
            return None
        self._parts.append(line)
        return self._whole()

    def clear(self) -> None:
        self._parts.clear()
        self._quoted = False

    def _whole(self) -> str:
        text = "\n".join(self._parts)
        self.clear()
        return text


def is_there(path: Path) -> bool:
    """Return whether `path` is a file; False if that cannot be determined."""
    try:
        return path.is_file()
    except OSError:  # not a valid file name
        return False


def read(text: str, is_file: Callable[[Path], bool] = is_there) -> ChatCommand | ChatMessage | InvalidInput:
    """Parse a text. `is_file`: returns whether a file exists."""
    if not text.startswith("/") or is_file(Path(text.split()[0])):
        return ChatMessage(text, tuple(_images(text, is_file)))
    word, _, rest = text[1:].partition(" ")
    for verb in VERBS:
        if word == verb:
            return ChatCommand(verb, rest.strip())
    return InvalidInput(f"unknown command /{word}; /help lists commands")


def _images(text: str, is_file: Callable[[Path], bool]) -> list[Path]:
    try:
        words = shlex.split(text)
    except ValueError:  # an unmatched apostrophe, for example
        words = text.split()
    named = [Path(word).expanduser() for word in words if word.lower().endswith(IMAGE_SUFFIXES)]
    return [path for path in named if is_file(path)]
