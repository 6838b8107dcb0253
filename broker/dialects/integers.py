"""Integers written as floats, `"max_tokens": 426.0`, as in languages with one number type.

JSON makes no difference, nor does OpenAI's server. msgspec does, and its lax mode would accept strings as
numbers too. So each float that it refuses is converted in place, and the body is decoded again.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

FLOATS_MAX = 16
"""Maximum conversions in one body: each costs another decoding."""
_EXACT = 2**53
"""Beyond this, a float may differ from the number in the body."""

_FLOAT = re.compile(r"Expected `int[^`]*`, got `float` - at `\$\.?(?P<path>[^`]*)`")
_STEP = re.compile(r"\[(?P<index>\d+)\]|\.?(?P<name>[^.\[\]]+)")


def mended(document: Any, complaint: str) -> bool:
    """Convert the float named by msgspec's error `complaint` to an int in place; return whether it was."""
    found = _FLOAT.match(complaint)
    steps = list(_STEP.finditer(found["path"])) if found else []
    # A path with `[...]` (any element) cannot be resolved.
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
    """Decode a body that was refused with `error`, converting floats to integers.

    Raises `msgspec.ValidationError` for any other error.
    """
    if _FLOAT.match(str(error)) is None:
        raise error  # decoding the whole body for it would be in vain
    document = msgspec.json.decode(body)
    for _ in range(FLOATS_MAX):
        if not mended(document, str(error)):
            break
        try:
            return decoder.decode(msgspec.json.encode(document))
        except msgspec.ValidationError as further:
            error = further
    raise error
