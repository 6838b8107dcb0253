"""Parser of chat input: commands and messages. Pure, except for the check whether a file exists.

A line with only a triple quote begins a text that another one ends. Words that name image files add these
images.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from protocol.common.error_text import closest_match
from protocol.common.model_folder import expand_user

ReadLine = Callable[[str], str]
"""(prompt) -> the typed line. Raises `EOFError` at the end, or `KeyboardInterrupt`."""

QUOTE = '"""'
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")

Verb = Literal["help", "clear", "retry", "save", "system", "set", "image", "model", "thought", "exit"]
VERBS: tuple[Verb, ...] = get_args(Verb)
ALIASES: dict[str, Verb] = {"new": "clear", "again": "retry", "quit": "exit", "bye": "exit"}
"""Names of other programs, and earlier ones of this one."""
ARGUMENTS_REQUIRED = {"save": "FILE", "image": "FILE"}

PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "priority"),
    *("reasoning_effort", "enable_thinking", "thinking_budget", "speculation", "sparse_prefill"),
)
"""Names for /set. Servers ignore unknown names, so a misspelt one must be found here; values they check."""

HELP = """\
/clear            start a new conversation
/retry            generate the last answer again
/save FILE        save the conversation as Markdown, or as messages if FILE ends in .json
/system TEXT      set the system prompt; without TEXT, remove it
/set NAME VALUE   set a parameter, such as temperature or max_tokens; without VALUE, remove it
/set              show the parameters that are set
/image FILE       send an image with the next message; a message may also name files itself
/model NAME       continue with another model
/thought          show the reasoning of the last answer
/exit             or Ctrl-D

A line with only \"\"\" begins and ends a text of several lines.
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
class Parameter:
    """A parameter of the following requests. `value`: None to remove it."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class InvalidInput:
    """Invalid input, with the reason."""

    why: str


def read_input(read_line: ReadLine) -> str:
    """Read a line, or the lines between two triple quotes. Raises what `read_line` raises."""
    if (line := read_line(">>> ")).strip() != QUOTE:
        return line
    lines = []
    while (line := read_line("... ")).strip() != QUOTE:
        lines.append(line)
    return "\n".join(lines)


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
        if verb == ALIASES.get(word, word):
            if verb in ARGUMENTS_REQUIRED and not rest.strip():
                return InvalidInput(f"write /{verb} {ARGUMENTS_REQUIRED[verb]}")
            return ChatCommand(verb, rest.strip())
    return InvalidInput(f"unknown command /{word}; /help lists commands")


def read_parameter(text: str) -> Parameter | InvalidInput:
    """Parse the argument of /set. A value is JSON, or else a string."""
    name, _, value = text.partition(" ")
    if name not in PARAMETERS:
        hint = closest_match(name, PARAMETERS) or f"; known parameters: {', '.join(PARAMETERS)}"
        return InvalidInput(f"unknown parameter {name}{hint}")
    try:
        return Parameter(name, json.loads(value) if value.strip() else None)
    except (ValueError, RecursionError):
        return Parameter(name, value.strip())


def _images(text: str, is_file: Callable[[Path], bool]) -> list[Path]:
    try:
        words = shlex.split(text)
    except ValueError:  # an unmatched apostrophe, for example
        words = text.split()
    named = [expand_user(Path(word)) for word in words if word.lower().endswith(IMAGE_SUFFIXES)]
    return [path for path in named if is_file(path)]
