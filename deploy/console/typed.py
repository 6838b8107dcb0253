"""What somebody has typed: a command, or something to say. Pure, but for whether a file is there.

A line that ends in a backslash goes on in the next one; one that is a triple quote begins a text that ends
with another. Words that name image files are sent as these.
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
/new            forget what was said
/again          have the last answer anew
/image FILE     send an image with the next words; or name it among them
/system WORDS   what the model is told before everything
/model NAME     go on with another model
/thought        what was thought before the last answer
/quit           or Ctrl-D

A line that ends in \\ goes on in the next; \"\"\" begins a text of several lines, and ends it.
Ctrl-C ends an answer early."""


@dataclass(frozen=True, slots=True)
class Order:
    """A command, and what follows it."""

    verb: Verb
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """Something to be answered."""

    text: str
    images: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Wrong:
    """It cannot be meant; says why."""

    why: str


@dataclass(slots=True)
class Lines:
    """Puts lines together. `open`: more must come."""

    _parts: list[str] = field(default_factory=list)
    _quoted: bool = False

    @property
    def open(self) -> bool:
        return self._quoted or bool(self._parts)

    def add(self, line: str) -> str | None:
        """The whole text, once it is there."""
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
    """Whether it is a file, as far as anybody can tell."""
    try:
        return path.is_file()
    except OSError:  # no name that a file can have
        return False


def read(text: str, is_file: Callable[[Path], bool] = is_there) -> Order | Said | Wrong:
    """`is_file`: whether there is one."""
    if not text.startswith("/") or is_file(Path(text.split()[0])):
        return Said(text, tuple(_images(text, is_file)))
    word, _, rest = text[1:].partition(" ")
    for verb in VERBS:
        if word == verb:
            return Order(verb, rest.strip())
    return Wrong(f"there is no /{word}; /help tells what there is")


def _images(text: str, is_file: Callable[[Path], bool]) -> list[Path]:
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe, say
        words = text.split()
    named = [Path(word).expanduser() for word in words if word.lower().endswith(IMAGE_SUFFIXES)]
    return [path for path in named if is_file(path)]
