"""Repair of tool-call arguments: the model's text -> `input`, which is always a JSON object."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from broker.dialects.json_size import is_too_deep

_TOKEN = re.compile(r'\s*("[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+)', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}
_TRIES_MAX = 3
"""Maximum number of cut positions tried: only the last value, a number or a name, can be incomplete."""

_Open = tuple[str, Any] | None
"""The closing bracket of the innermost container, linked to those around it."""

_object: msgspec.json.Decoder[dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw])


def object_of(arguments: str) -> Raw:
    """Return a JSON object: the arguments if valid, the complete values of a truncated object, or `{}`."""
    if _is_object(arguments):
        return Raw(arguments.encode())
    for end, open in reversed(_places(arguments)):
        mended = arguments[:end] + "".join(_closings(open))
        if _is_object(mended):
            return Raw(mended.encode())
    return Raw(b"{}")


def _is_object(text: str) -> bool:
    if is_too_deep(text.encode(errors="replace")):
        return False
    try:
        _object.decode(text)
    except (msgspec.MsgspecError, UnicodeError):
        return False
    return True


def _places(text: str) -> deque[tuple[int, _Open]]:
    """Return the last positions where a value ends or a container begins, with the open containers."""
    places: deque[tuple[int, _Open]] = deque(maxlen=_TRIES_MAX)
    open: _Open = None
    before, position = "", 0
    while found := _TOKEN.match(text, position):
        token, position = found[1], found.end()
        if token in _CLOSING:
            open = (_CLOSING[token], open)
        elif open is not None and token == open[0]:
            open = open[1]
        is_key = token.startswith('"') and open is not None and open[0] == "}" and before in ("{", ",")
        if token not in (":", ",") and not is_key:
            places.append((position, open))
        before = token
    return places


def _closings(open: _Open) -> Iterator[str]:
    while open is not None:
        closing, open = open
        yield closing
