"""Custom tools (`custom`, with free-text input), offered to models as functions with one string argument.

The model writes `{"input": "…"}`, and the client receives the contents of the string as they are streamed. A
grammar of the tool is shown to the model but not enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from broker.dialects.tools import INPUT

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PAIRLESS = rf"{_HIGH}(?=[^\\]|\\[^u]|\\u[0-9a-ce-fA-CE-F]|\\u[dD][0-9abAB])"
_PLAIN = r"\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
_WHOLE = re.compile(rf'(?:[^"\\]|\\[^u]|{_HIGH}{_LOW}|{_PAIRLESS}|{_PLAIN})*')
"""Matches the complete part of a JSON string: it never splits an escape or a surrogate pair."""
_ESCAPE = re.compile(rf"{_HIGH}{_LOW}|\\u[0-9a-fA-F]{{4}}|\\.", re.DOTALL)


class InputReader:
    """Streaming extractor of a call's input from its arguments."""

    def __init__(self) -> None:
        self._unread = ""
        self._arguments: list[str] = []
        self._sent: list[str] = []
        self._is_inside = False

    def push(self, arguments: str) -> str:
        """Accept more of the arguments and return the new text of the input."""
        self._arguments.append(arguments)
        self._unread += arguments
        if not self._is_inside:
            found = _OPENING.match(self._unread)
            if found is None:
                return ""
            self._is_inside, self._unread = True, self._unread[found.end() :]
        return self._send(_whole(self._unread))

    def _send(self, escaped: str) -> str:
        self._unread = self._unread[len(escaped) :]
        text = _unescaped(escaped)
        self._sent.append(text)
        return text

    def close(self) -> str:
        """Return the remaining text: all of it if the arguments could not be parsed while streaming."""
        if self._is_inside:
            return ""
        text = _read("".join(self._arguments))
        self._sent.append(text)
        return text

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._sent)


def _whole(unread: str) -> str:
    found = _WHOLE.match(unread)
    return found[0] if found else ""


def _unescaped(escaped: str) -> str:
    return _ESCAPE.sub(lambda found: _character(found[0]), escaped)


def _character(escape: str) -> str:
    """Decode one escape. A lone surrogate becomes a question mark."""
    try:
        return str(json.loads(f'"{escape}"')).encode(errors="replace").decode()
    except ValueError:  # invalid escape
        return escape


def _read(arguments: str) -> str:
    """Return the text in arguments of an unexpected form, or the arguments themselves."""
    try:
        found: Any = msgspec.json.decode(arguments.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    values = list(found.values()) if isinstance(found, Mapping) else [found]
    named = found.get(INPUT) if isinstance(found, Mapping) else None
    text = named if isinstance(named, str) else values[0] if len(values) == 1 else None
    return text if isinstance(text, str) else arguments if values else ""
