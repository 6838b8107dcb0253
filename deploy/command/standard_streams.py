"""Standard streams of a command whose caller has closed them, as `roundhouse serve <&- >&- 2>&-` does."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""Name and mode of each stream, by its descriptor."""


def open_missing() -> None:
    """Open /dev/null in place of each closed standard stream.

    Otherwise the next file or socket would take its descriptor, and child processes would use that as theirs.
    """
    for fd, (name, mode) in enumerate(_STREAMS):
        if not _is_open(fd):
            # Takes the lowest free number, which is `fd`.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def _is_open(fd: int) -> bool:
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False
