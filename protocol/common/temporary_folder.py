"""Temporary folders that no process leaves behind.

A process holds a lock on a file in each of its folders, and the operating system releases it when the process
ends, however that happens. So a folder whose lock is free is stale, and is deleted when the next folder is
made. `delete_all` is for processes that end by `os._exit`, which runs no clean-up.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from protocol.common.secure_files import is_private, lock_file

_PREFIX = "roundhouse-"
_LOCK = ".roundhouse-lock"
"""Lock file, which also marks the folder as ours."""

_folders: set[TemporaryFolder] = set()
"""The folders of this process."""


class TemporaryFolder:
    """Temporary folder with mode 0700. As a context manager, it is deleted at the end."""

    def __init__(self, kind: str) -> None:
        """Make a folder, and delete stale ones of any kind. `kind`: a word for its name. Raises `OSError`."""
        parent = Path(tempfile.gettempdir())
        _delete_stale(parent)
        self._lock: int | None = None
        while self._lock is None:  # None: another process has taken the new folder for a stale one
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=parent))
            self._lock = lock_file(self.path / _LOCK, os.O_CREAT)
        _folders.add(self)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.delete()

    def delete(self) -> None:
        """Delete the folder and its content; may be called again, and from any thread."""
        lock, self._lock = self._lock, None
        _folders.discard(self)
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def delete_all() -> None:
    """Delete all folders of this process."""
    for folder in list(_folders):
        folder.delete()


def _delete_stale(parent: Path) -> None:
    """Delete the folders of processes that have ended. Other users' folders are not touched."""
    for path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        folder = path.parent
        try:
            lock = lock_file(path) if is_private(folder) else None
        except OSError:  # another process has just deleted it
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
