"""Common prefix of two sequences, of tokens or of characters."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_length(one: Sequence[object], other: Sequence[object], start: int = 0) -> int:
    """Return the length of the common prefix of `one` and `other[start:]`.

    It is searched by comparing slices, which is much faster than comparing items.
    """
    low, high = 0, min(len(one), len(other) - start)
    one, other = one[:high], other[start : start + high]
    if type(one) is not type(other):  # a list never equals a tuple
        one, other = tuple(one), tuple(other)
    if one == other:
        return high
    high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
