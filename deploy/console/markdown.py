"""Where Markdown that still grows will not change any more. Pure.

What is settled can be printed for good; only what comes behind it must be drawn again with each piece.
"""

from __future__ import annotations

_FENCES = ("```", "~~~")


def settled(text: str) -> int:
    """The length of the longest beginning that ends between two blocks: behind an empty line outside of a
    fence, which is followed by something that does not go on with what stands before it."""
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
    """Indented, or an item of a list: it belongs to the list above."""
    stripped = line.lstrip()
    is_item = stripped[:2] in ("- ", "* ", "+ ") or stripped.split(".")[0].isdigit()
    return line[0] in " \t" or is_item
