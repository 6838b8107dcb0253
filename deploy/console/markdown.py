"""Finished prefix of growing Markdown. Pure.

The finished part is printed once; only the rest must be redrawn with each delta.
"""

from __future__ import annotations

_FENCES = ("```", "~~~")


def settled(text: str) -> int:
    """Return the length of the longest prefix that ends between two blocks: after an empty line outside of a
    code fence, if the next line does not continue the block before it."""
    end, position, fence, was_empty = 0, 0, "", False
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        if was_empty and not fence and stripped and not _goes_on(line):
            end = position
        mark = stripped[:3]
        if mark in _FENCES:
            fence = "" if fence == mark else fence or mark
        was_empty = not stripped and line.endswith("\n")
        position += len(line)
    return end


def _goes_on(line: str) -> bool:
    """Return whether a line may belong to the list above it: it is indented, or a list item."""
    stripped = line.lstrip()
    is_item = stripped[:2] in ("- ", "* ", "+ ") or stripped.split(".")[0].isdigit()
    return line[0] in " \t" or is_item
