"""Arguments of tool calls that are no JSON object, or none that every decoder takes.

A call may break off, or hold an integer of 30 digits, `1e999`, `NaN` or half an emoji. Clients send such a
call back with each later turn, so it must never be refused. There is one rule: the gateway passes on as text
what it cannot pass on as an object. A template that takes text gets exactly what the model wrote, so that the
prompt continues the cached one. Any other gets the object that the text begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from math import isfinite
from typing import Any

# Deeper arguments stay text: templates walk them with recursive macros, several stack frames per level.
ARGUMENTS_DEPTH_MAX = 64

_INTEGER_MIN, _INTEGER_MAX = -(2**63), 2**64 - 1  # range of the wire format
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # not encodable in UTF-8; JSON escapes can produce one
_HALF = re.compile("[\ud800-\udbff]$")
_STRING = re.compile(r'"((?:[^"\\]++|\\.)*+)("?)', re.DOTALL)
_CUT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\u[0-9a-fA-F]{0,3}$")
_ATOM = re.compile(r"[-+.\w]+")
_CUT_NUMBER = re.compile(r"-?[0-9]*[-+.eE0-9]*")
_INFINITE = ("NaN", "Infinity", "-Infinity")
_WORDS = ("true", "false", "null", *_INFINITE)
_SPACES = re.compile(r"[ \t\r\n]*")


def is_portable(value: Any) -> bool:
    """Return whether the wire and templates can carry `value`: bounded depth and numbers, UTF-8 strings."""
    level = [value]
    for _ in range(ARGUMENTS_DEPTH_MAX):
        if not all(map(_is_portable_item, level)):
            return False
        level = [item for container in level for item in _items(container)]
        if not level:
            return True
    return False


def _is_portable_item(value: Any) -> bool:
    match value:
        case str():
            return _LONE_SURROGATE.search(value) is None
        case int():
            return _INTEGER_MIN <= value <= _INTEGER_MAX
        case float():
            return isfinite(value)
        case _:
            return True


def _items(value: Any) -> Iterable[Any]:
    match value:
        case dict():
            return [*value.keys(), *value.values()]
        case list():
            return value
        case _:
            return ()


def object_in(text: str, *, with_cut_string: bool = True) -> dict[str, Any] | None:
    """Return the portable object that is in a text, or that it begins; None: it is no JSON object.

    What is complete is in the object, and the beginning of a string unless `with_cut_string` is False. A
    number that is not portable is its text.
    """
    roots: list[Any] = []
    reader = _PartialReader(text, with_cut_string=with_cut_string)
    try:
        reader.read(roots.append)
        reader.end()
    except _CutError:
        pass
    except ValueError:
        return None
    return roots[0] if roots and isinstance(roots[0], dict) else None


class _CutError(Exception):
    """The text ends within its value."""


class _PartialReader:
    """Reader of a JSON value that may be cut. Raises `ValueError` where the text is no JSON."""

    def __init__(self, text: str, *, with_cut_string: bool) -> None:
        self._text = text
        self._at = 0
        self._with_cut_string = with_cut_string

    def read(self, keep: Callable[[Any], None], depth: int = 1) -> None:
        """Read a value. `keep`: takes it when it begins, so that a cut loses nothing before it."""
        if depth > ARGUMENTS_DEPTH_MAX:
            raise ValueError
        match self._peek():
            case "{":
                keep(members := dict[str, Any]())
                self._read_members(members, depth)
            case "[":
                keep(items := list[Any]())
                self._read_items(items, depth)
            case '"':
                keep(self._read_string(keep if self._with_cut_string else None))
            case _:
                keep(self._read_atom())

    def end(self) -> None:
        """Check that nothing follows."""
        if self._text[self._at :].strip():
            raise ValueError

    def _read_members(self, members: dict[str, Any], depth: int) -> None:
        self._at += 1
        if self._peek() == "}":
            self._at += 1
            return
        separator = ","
        while separator == ",":
            if self._peek() != '"':
                raise ValueError
            key = self._read_string(None)
            self._expect(":")
            self.read(partial(members.__setitem__, key), depth + 1)
            separator = self._expect(",}")

    def _read_items(self, items: list[Any], depth: int) -> None:
        self._at += 1
        if self._peek() == "]":
            self._at += 1
            return
        separator = ","
        while separator == ",":
            self.read(items.append, depth + 1)
            separator = self._expect(",]")

    def _peek(self) -> str:
        """Return the next character behind white space. Raises `_CutError` at the end."""
        found = _SPACES.match(self._text, self._at)
        self._at = found.end() if found else self._at
        if self._at == len(self._text):
            raise _CutError
        return self._text[self._at]

    def _expect(self, characters: str) -> str:
        if (character := self._peek()) not in characters:
            raise ValueError
        self._at += 1
        return character

    def _read_string(self, keep_cut: Callable[[str], None] | None) -> str:
        found = _STRING.match(self._text, self._at)
        assert found is not None, "a string begins here"
        self._at = found.end()
        if found[2]:
            return _LONE_SURROGATE.sub("\ufffd", _decoded(found[1]))
        if keep_cut is not None:
            begun = _HALF.sub("", _decoded(_CUT_ESCAPE.sub(r"\1", found[1])))
            keep_cut(_LONE_SURROGATE.sub("\ufffd", begun))
        raise _CutError

    def _read_atom(self) -> Any:
        found = _ATOM.match(self._text, self._at)
        atom = found[0] if found else ""
        self._at += len(atom)
        if atom and self._at == len(self._text):
            if _CUT_NUMBER.fullmatch(atom) or any(word.startswith(atom) for word in _WORDS):
                raise _CutError  # more of it may be missing
            raise ValueError
        numbers: dict[str, Any] = {"parse_int": _integer_or_text, "parse_float": _float_or_text}
        return json.loads(atom, **numbers, parse_constant=str)


def _decoded(escaped: str) -> str:
    return str(json.loads(f'"{escaped}"', strict=False))


def _integer_or_text(text: str) -> int | str:
    value = int(text) if len(text) <= len(str(_INTEGER_MIN)) else _INTEGER_MAX + 1
    return value if _is_portable_item(value) else text


def _float_or_text(text: str) -> float | str:
    value = float(text)
    return value if isfinite(value) else text
