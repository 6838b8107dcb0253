"""Tools that take text as it is (`custom`), offered as functions of one string to models that call functions.

What the model writes is `{"input": "…"}`, and what the client is given is what is in the string, letter by
letter as it comes. A grammar that the client has for it is shown to the model, which is not held to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from broker.dialects.tools import FunctionTool

INPUT = "input"
"""The one argument."""

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PAIRLESS = rf"{_HIGH}(?=[^\\]|\\[^u]|\\u[0-9a-ce-fA-CE-F]|\\u[dD][0-9abAB])"
_PLAIN = r"\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
_WHOLE = re.compile(rf'(?:[^"\\]|\\[^u]|{_HIGH}{_LOW}|{_PAIRLESS}|{_PLAIN})*')
"""What is complete of a string in JSON: no escape is cut, nor two of them that make one character."""
_ESCAPE = re.compile(rf"{_HIGH}{_LOW}|\\u[0-9a-fA-F]{{4}}|\\.", re.DOTALL)


class Grammar(Struct):
    """`type`: `text`, where there is none."""

    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Struct):
    name: str
    description: str | None = None
    format: Grammar | None = None

    def function(self) -> FunctionTool:
        """What is offered in its place."""
        told = self.description or ""
        form = "The whole input, as free text."
        if self.format is not None and self.format.definition:
            form = f"The whole input, as text of this {self.format.syntax or 'lark'} grammar:\n"
            form += self.format.definition
        argument = {"type": "string", "description": form}
        parameters = {"type": "object", "properties": {INPUT: argument}, "required": [INPUT]}
        return FunctionTool(self.name, told or None, parameters)


class InputReader:
    """The input of one call, out of its arguments as they grow."""

    def __init__(self) -> None:
        self._unread = ""
        self._arguments: list[str] = []
        self._told: list[str] = []
        self._is_inside = False

    def push(self, arguments: str) -> str:
        """What is known of the input by this that was not before."""
        self._arguments.append(arguments)
        self._unread += arguments
        if not self._is_inside:
            found = _OPENING.match(self._unread)
            if found is None:
                return ""
            self._is_inside, self._unread = True, self._unread[found.end() :]
        return self._told_of(_whole(self._unread))

    def _told_of(self, escaped: str) -> str:
        self._unread = self._unread[len(escaped) :]
        text = _unescaped(escaped)
        self._told.append(text)
        return text

    def close(self) -> str:
        """What is still to be told: all, where the arguments were none that could be read as they came."""
        if self._is_inside:
            return ""
        text = _read("".join(self._arguments))
        self._told.append(text)
        return text

    @property
    def text(self) -> str:
        """All that was told."""
        return "".join(self._told)


def _whole(unread: str) -> str:
    found = _WHOLE.match(unread)
    return found[0] if found else ""


def _unescaped(escaped: str) -> str:
    return _ESCAPE.sub(lambda found: _character(found[0]), escaped)


def _character(escape: str) -> str:
    """Half a pair is no character: it is told as a question mark."""
    try:
        return str(json.loads(f'"{escape}"')).encode(errors="replace").decode()
    except ValueError:  # there is no such escape
        return escape


def _read(arguments: str) -> str:
    """The text in arguments of another form than was asked for; or else themselves."""
    try:
        found: Any = msgspec.json.decode(arguments.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    values = list(found.values()) if isinstance(found, Mapping) else [found]
    named = found.get(INPUT) if isinstance(found, Mapping) else None
    text = named if isinstance(named, str) else values[0] if len(values) == 1 else None
    return text if isinstance(text, str) else arguments if values else ""
