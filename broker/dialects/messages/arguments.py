"""The arguments of a call, as the model has written them -> its `input`, an object whatever was written."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

_TOKEN = re.compile(r'\s*("[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+)', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}
_TRIES_MAX = 3
"""Of places to cut at: only the last value can be unfinished, and is then no more than a number or a name."""

_Open = tuple[str, Any] | None
"""What closes the innermost container, and those around it."""

_object: msgspec.json.Decoder[dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw])


def object_of(arguments: str) -> Raw:
    """As JSON: what was written, if it is a whole object; the whole values of one that was cut short; else an
    empty one."""
    if _is_object(arguments):
        return Raw(arguments.encode())
    for end, open in reversed(_places(arguments)):
        mended = arguments[:end] + "".join(_closings(open))
        if _is_object(mended):
            return Raw(mended.encode())
    return Raw(b"{}")


def _is_object(text: str) -> bool:
    try:
        _object.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return True


def _places(text: str) -> deque[tuple[int, _Open]]:
    """The last places where a value has ended or a container begun, and what is open there."""
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
