"""Length of the common prefix of two sequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.common_prefix import common_prefix_length

TOKENS = st.lists(st.integers(0, 1), max_size=12)


@given(TOKENS, TOKENS, st.integers(0, 12))
def test_length_is_that_of_the_common_prefix_in_any_type_of_sequence(
    one: list[int], other: list[int], start: int
) -> None:
    start = min(start, len(other))
    right = 0
    while right < min(len(one), len(other) - start) and one[right] == other[start + right]:
        right += 1
    assert common_prefix_length(one, other, start) == right
    assert common_prefix_length(tuple(one), other, start) == right
    assert common_prefix_length("".join(map(str, one)), "".join(map(str, other)), start) == right
