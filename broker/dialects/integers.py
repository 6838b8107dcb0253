"""Integers that are written as floats, `"max_tokens": 426.0`, as languages with one kind of number do.

JSON itself knows no difference, and OpenAI's server makes none. msgspec does, and its only way to be less
strict would take text for numbers as well; so what it refuses is mended just there, and read again.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

FLOATS_MAX = 16
"""Mended in one body: each costs another reading."""
_EXACT = 2**53
"""Beyond it, a float need not be the number that was written."""

_FLOAT = re.compile(r"Expected `int[^`]*`, got `float` - at `\$\.?(?P<path>[^`]*)`")
_STEP = re.compile(r"\[(?P<index>\d+)\]|\.?(?P<name>[^.\[\]]+)")


def mended(document: Any, complaint: str) -> bool:
    """Whether what msgspec complains of in a document is a whole number, which then is an integer there."""
    found = _FLOAT.match(complaint)
    steps = list(_STEP.finditer(found["path"])) if found else []
    # What stands in some element or other (`[...]`) has no place that could be found again.
    if found is None or not steps or "".join(step[0] for step in steps) != found["path"]:
        return False
    *way, last = [int(step["index"]) if step["index"] else step["name"] for step in steps]
    try:
        for key in way:
            document = document[key]
        number = document[last]
    except (LookupError, TypeError):
        return False
    if not isinstance(number, float) or not number.is_integer() or abs(number) > _EXACT:
        return False
    document[last] = int(number)
    return True


def decoded(decoder: msgspec.json.Decoder[Any], body: bytes, error: msgspec.ValidationError) -> Any:
    """A body that was refused with `error`, with its integers mended. Raises `msgspec.ValidationError` for
    what is wrong beside them."""
    try:
        document = msgspec.json.decode(body)
    except RecursionError:  # deeper than anybody looks who knows what he looks for
        raise error from None
    for _ in range(FLOATS_MAX):
        if not mended(document, str(error)):
            break
        try:
            return decoder.decode(msgspec.json.encode(document))
        except msgspec.ValidationError as further:
            error = further
    raise error
