"""Parsing and formatting of sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.settings import reader as settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7B", 7), ("1K", 1024), ("1KiB", 1024), ("500 MB", 500_000_000), ("4GiB", 4 * 2**30),
        ("4GB", 4_000_000_000), ("1TiB", 2**40), (" 1.5GiB ", 3 * 2**29), ("0.0001K", 0),
        ("999999999999999999.5K", (2 * 999999999999999999 + 1) * 512),
    ],
)  # fmt: skip
def test_a_size_is_read(text: str, expected: int) -> None:
    assert settings.parse_size(text) == expected


NO_SIZES = "|GiB|many|-1|1e9|1,5GiB|.5G|4GiBs|4 G B|0x10|1_000|४GiB|nan"


def test_invalid_size_is_refused() -> None:
    for text in (*NO_SIZES.split("|"), " ", "9" * 20):
        with pytest.raises(settings.SizeError, match="Expected a size"):
            settings.parse_size(text)


@given(st.integers(0, 2**62), st.integers(1, 1023), st.sampled_from("KMGT"))
def test_a_size_that_is_spelled_is_read_as_itself(size: int, count: int, unit: str) -> None:
    assert settings.parse_size(settings.spell_size(size)) == size
    assert settings.spell_size(count * 1024 ** ("KMGT".index(unit) + 1)) == f"{count}{unit}iB"


@given(st.text(max_size=12) | st.text("0123456789.KMGTiB -+e", max_size=8))
def test_any_text_is_a_size_or_is_refused_as_none(text: str) -> None:
    try:
        size = settings.parse_size(text)
    except settings.SizeError:
        return
    assert size >= 0
    assert text.strip()[0] in "0123456789"
