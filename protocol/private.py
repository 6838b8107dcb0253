"""Files and folders that hold secrets: ours, and closed to everybody else."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECRET_BYTES_MAX = 2**20


def read_private(path: Path) -> bytes:
    """The content of a file that nobody but its owner, root or ourselves, can read.

    Raises `OSError`: `PermissionError` where others can, and for a file beyond `SECRET_BYTES_MAX`.
    """
    # Non-blocking: a pipe in its place must not hold us up.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(f"{path} is not a file")
        if info.st_mode & 0o077 or info.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{path} must be yours and closed to others (mode 0600)")
        if info.st_size > SECRET_BYTES_MAX:
            raise OSError(f"{path} is larger than {SECRET_BYTES_MAX} bytes")
        return file.read(SECRET_BYTES_MAX)


def is_private(folder: Path) -> bool:
    """Is this a folder, and no link to one, that only we can enter?"""
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


@contextmanager
def made_private() -> Iterator[None]:
    """What this process makes meanwhile is never open to others, not even for a moment. Be brief."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
