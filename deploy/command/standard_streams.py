"""Standard streams of a command: open, even if its caller has closed them, and UTF-8 in every locale."""

from __future__ import annotations

import io
import locale
import os
import sys
from contextlib import suppress

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""Name and mode of each stream, by its descriptor."""


def prepare() -> None:
    """Make the standard streams usable, and this process independent of its locale."""
    _open_missing()
    _use_utf8()


def _open_missing() -> None:
    """Open /dev/null in place of each closed standard stream, as after `roundhouse serve <&- >&- 2>&-`.

    Otherwise the next file or socket would take its descriptor, and child processes would use that as theirs.
    """
    for fd, (name, mode) in enumerate(_STREAMS):
        if not _is_open(fd):
            # Takes the lowest free number, which is `fd`.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8", closefd=False))


def _is_open(fd: int) -> bool:
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False


def _use_utf8() -> None:
    """Read and write UTF-8; in a locale with another encoding, restart this process in Python's UTF-8 mode.

    Only that mode decodes arguments and names of files as UTF-8, and text files that libraries read.
    """
    if not sys.flags.utf8_mode and locale.getencoding().lower().replace("-", "") != "utf8" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            errors = "strict" if stream is sys.stdin else "backslashreplace"
            stream.reconfigure(encoding="utf-8", errors=errors)
