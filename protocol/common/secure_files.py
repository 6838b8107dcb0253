"""Files and folders with secrets, accessible to their owner only."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECRET_BYTES_MAX = 2**20


def read_private(path: Path) -> bytes:
    """Read a file that is owned by root or this user and that no one else can read.

    Raises `PermissionError` if others can read it, and `OSError` beyond `SECRET_BYTES_MAX` bytes.
    """
    # Non-blocking: if the path is a pipe, opening it must not block.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(f"{path} is not a file")
        if info.st_mode & 0o077 or info.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{path} must be owned by you and accessible to no one else (mode 0600)")
        if info.st_size > SECRET_BYTES_MAX:
            raise OSError(f"{path} is larger than {SECRET_BYTES_MAX} bytes")
        return file.read(SECRET_BYTES_MAX)


def database_files(path: Path) -> list[Path]:
    """Return what there is of an SQLite file: itself, and what SQLite keeps beside it."""
    named = (path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal"))
    return [part for part in named if part.exists()]


def is_private(folder: Path) -> bool:
    """Return whether `folder` is a folder, not a link, and only this user can enter it."""
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def is_protected(folder: Path) -> bool:
    """Return whether no other user but root can put anything at a path in `folder`: others can write neither
    to it nor, except for sticky folders such as /tmp, to those it lies in, and own no link on the way there.
    Raises `OSError`."""
    trusted, named, real = (0, os.geteuid()), folder.absolute(), folder.resolve(strict=True)
    if any(place.lstat().st_uid not in trusted for place in (named, *named.parents)):
        return False
    for place in (real, *real.parents):
        info = place.stat()
        is_shared = bool(info.st_mode & 0o022) and (place == real or not info.st_mode & stat.S_ISVTX)
        if is_shared or info.st_uid not in trusted:
            return False
    return True


def replace_private(path: Path, content: bytes) -> None:
    """Replace a file, at once and on the disk, by one that only its owner can read. Raises `OSError`."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def create_private() -> Iterator[None]:
    """Make this process create files for their owner only. The umask is process-wide: be brief."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def lock_file(path: Path, flags: int = 0) -> int | None:
    """Lock a file until the returned descriptor is closed; None if another process has it, or has just
    removed it. `flags`: more flags to open it with. Raises `OSError`."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    except FileNotFoundError:
        return None
    is_ours = False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(lock), path.stat())
    except (BlockingIOError, FileNotFoundError):
        pass  # in use, or deleted before it was locked
    finally:
        if not is_ours:
            os.close(lock)
    return lock if is_ours else None
