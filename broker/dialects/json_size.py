"""Size of a JSON body in values, keys, containers and depth, measured before it is decoded.

Decoding makes an object of each of them, and holds the interpreter lock meanwhile: a body of millions would
stop all streams for seconds, whichever thread decodes it. Counting bytes takes milliseconds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from protocol.errors import Code, RequestError

VALUES_MAX = 2**20
"""Maximum number of values that are separated by commas: a prompt of a million tokens."""
KEYS_MAX = 2**18
CONTAINERS_MAX = 2**17
"""Fewer, because garbage collection visits each of them: ten thousand tools, or messages with parts."""
DEPTH_MAX = 256
"""Decoders have limits of their own, between 1,000 levels (Python 3.11) and what the stack takes (3.14)."""

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
"""A string, or the unterminated one at the end of a body that is not JSON."""
_STRINGS = re.compile(_STRING, re.DOTALL)
_RUNS = re.compile(rb'(?:[^"]*+' + _STRING + rb"){1,4096}", re.DOTALL)
"""Strings with what is before each, not too many at once: a match holds the interpreter lock."""
_LEVELS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_TEXT = bytes(set(range(256)) - {*_LEVELS, ord('"')})


def is_too_deep(document: bytes) -> bool:
    """Return whether a JSON document nests containers deeper than `DEPTH_MAX`."""
    if document.count(b"[") + document.count(b"{") <= DEPTH_MAX:
        return False
    # Without escapes and text, what is left of most bodies is short.
    quoted = document.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _TEXT)
    brackets = itertools.chain.from_iterable(_outside_strings(quoted))
    levels = itertools.accumulate(map(_LEVELS.__getitem__, brackets))
    return any(map(DEPTH_MAX.__lt__, levels))


def check_size(body: bytes) -> None:
    """Raise `RequestError(request_too_large)` if a JSON body has more of anything than its maximum."""
    # Most bodies need no more than this: text has few of these characters.
    if len(body) <= CONTAINERS_MAX or _excess(_count(body)) is None:
        return
    counts = [0, 0, 0]
    for text in _outside_strings(body):
        counts = [before + more for before, more in zip(counts, _count(text), strict=True)]
        if (excess := _excess(counts)) is not None:
            raise RequestError(Code.REQUEST_TOO_LARGE, f"The request body has more than {excess}.")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """Yield a body without its strings, in pieces."""
    end = 0
    while run := _RUNS.match(body, end):
        end = run.end()
        yield _STRINGS.sub(b"", run[0])
    yield body[end:]


def _count(text: bytes) -> list[int]:
    """Count the containers, the keys, and the commas, which separate values."""
    return [text.count(b"[") + text.count(b"{"), text.count(b":"), text.count(b",")]


def _excess(counts: list[int]) -> str | None:
    """Return the maximum that is exceeded, with its name."""
    maxima = (CONTAINERS_MAX, KEYS_MAX, VALUES_MAX)
    names = ("JSON arrays and objects", "JSON keys", "JSON values")
    for count, most, name in zip(counts, maxima, names, strict=True):
        if count > most:
            return f"{most} {name}"
    return None
