"""Files that survive a power failure, accessible to their owner only. Synchronous."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

_MODE = 0o600


def open_private(path: Path, flags: int) -> BinaryIO:
    """Open a file of this user, which is created with mode 0600. Raises `OSError`."""
    writes = bool(flags & (os.O_RDWR | os.O_WRONLY))
    return open(
        path,
        "r+b" if writes else "rb",
        opener=lambda name, _: os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE),
    )


def write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically; it is on the disk when this returns. Raises `OSError`."""
    fresh = path.with_name(path.name + ".new")
    with open_private(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as file:
        file.write(content)
    settle(fresh, path)


def settle(fresh: Path, path: Path) -> None:
    """Rename a complete file to `path`, and write content and name to the disk. Raises `OSError`."""
    with open_private(fresh, os.O_RDWR) as file:
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
