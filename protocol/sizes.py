"""Human-readable sizes: `4GiB`, `500 MB`, `1.5G`, `65536`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from msgspec import Meta

BYTES = Meta(ge=0, le=2**62)
Size = Annotated[int, BYTES]
"""A setting in bytes, which `protocol.settings` also accepts as a human-readable size."""

_POWERS = "KMGT"
_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,18})?)\s*(?:([KMGT])(I?B)?|B)?\s*", re.ASCII | re.IGNORECASE)


class SizeError(ValueError):
    """An invalid size."""


def parse(text: str) -> int:
    """Return a size in bytes, rounded down. `KB` is 1000, `KiB` and `K` are 1024. Raises `SizeError`."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise SizeError(
            f"Expected a size in bytes or with KB, MB, GB, TB, KiB, MiB, GiB or TiB, not {text[:32]!r}"
        )
    number, unit, form = found.groups()
    base = 1000 if (form or "").upper() == "B" else 1024
    power = _POWERS.index(unit.upper()) + 1 if unit else 0
    return int(Fraction(number) * base**power)


def spell(size: int) -> str:
    """Return the shortest exact form of `size`: whole KiB, MiB, GiB or TiB, else bytes."""
    power = 0
    while size and power < len(_POWERS) and size % 1024 == 0:
        size, power = size // 1024, power + 1
    return f"{size}{_POWERS[power - 1]}iB" if power else str(size)
