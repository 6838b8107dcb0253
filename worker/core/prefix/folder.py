"""Folder of stored items: one file per item, named by its digest.

Writes are atomic: to a temporary file, synced and renamed. Files are trusted only if their checksums match;
damaged ones are removed. Several processes may use the folder: each may remove files, and a missing file is a
miss. Files with other names are left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from protocol.common.cache_folder import PREFIX_SUFFIX
from worker.core.prefix.files import DamagedFileError, FileWriter, Record, read_header, read_record

log = logging.getLogger(__name__)

LEFTOVER_AGE_S_MAX = 600.0
"""Age in seconds beyond which a temporary file is considered abandoned."""

DIGEST = re.compile(r"[0-9a-f]{8,128}")
_STORED = re.compile(f"({DIGEST.pattern}){re.escape(PREFIX_SUFFIX)}")
_ASIDE = re.compile(rf"{DIGEST.pattern}\.(\d{{1,9}})-[0-9a-f]{{8}}\.part")


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An existing item: the metadata in its header, and the size of its file."""

    digest: str
    about: dict[str, Any]
    file_bytes: int


class Folder:
    """Folder of the items of the model `fingerprint`. Used by one thread at a time; only `save` raises."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path, self._fingerprint = path, fingerprint
        self._sizes: dict[str, int] = {}
        self.usage = 0
        """Total bytes of the files found or written here and not removed since."""
        self.name = ""
        """Identity of the machine and the folder, independent of its path; empty: the folder is unusable."""
        try:
            self._make()
            path.chmod(0o700)
            found = path.stat()
            self.name = f"{os.uname().nodename}:{found.st_dev:x}:{found.st_ino:x}"
        except OSError as error:
            log.warning("prefix cache folder cannot be used: %s", error)

    def room(self) -> int | None:
        """Return the free bytes of the disk and those of these files, together; None: unknown."""
        try:
            return self.usage + shutil.disk_usage(self._path).free
        except OSError:
            return None

    def scan(self) -> Iterator[StoredItem]:
        """List the stored items from their headers. Removes damaged, foreign and abandoned files."""
        try:
            with os.scandir(self._path) as entries:
                names = [entry.name for entry in entries]
        except OSError:
            return
        for name in names:
            if match := _STORED.fullmatch(name):
                yield from self._look_at(match[1])
            elif match := _ASIDE.fullmatch(name):
                self._clean_up(self._path / name, int(match[1]))

    def _look_at(self, digest: str) -> Iterator[StoredItem]:
        try:
            header, size = read_header(self._file(digest), self._fingerprint, digest)
        except OSError as error:
            log.info("stored prefix %s skipped: %s", digest, error)
        except DamagedFileError as error:
            log.info("stored prefix %s removed: %s", digest, error)
            self.remove(digest)
        else:
            self._count(digest, size)
            yield StoredItem(digest, header.about, size)

    def _clean_up(self, aside: Path, pid: int) -> None:
        with contextlib.suppress(OSError):
            age_s = time.time() - aside.stat().st_mtime
            # In a container an earlier process had our pid; this one has not written anything yet.
            if pid == os.getpid() or age_s > LEFTOVER_AGE_S_MAX or not psutil.pid_exists(pid):
                aside.unlink()

    def read(self, digest: str) -> Record | None:
        """Read an item; None: missing, or damaged and therefore removed."""
        try:
            return read_record(self._file(digest), self._fingerprint, digest)
        except FileNotFoundError:
            self._count(digest, 0)
        except (OSError, DamagedFileError, MemoryError) as error:
            log.warning("stored prefix %s removed, reading failed: %s", digest, error)
            self.remove(digest)
        return None

    def save(self, draft: FileWriter) -> None:
        """Write an item. Raises `OSError`; then neither the new file nor the one it replaces exists."""
        aside = self._path / f"{draft.digest}.{os.getpid()}-{secrets.token_hex(4)}.part"
        try:
            self._make()
            with open(aside, "xb", opener=_open_private) as file:
                draft.write(file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self._file(draft.digest))
            self._sync()
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            self.remove(draft.digest)
            raise
        self._count(draft.digest, draft.file_bytes)

    def remove(self, digest: str) -> None:
        """Remove an item's file, ignoring errors."""
        with contextlib.suppress(OSError):
            self._file(digest).unlink()
        self._count(digest, 0)

    def _make(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _sync(self) -> None:
        # Without this, a power loss may undo the rename.
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _file(self, digest: str) -> Path:
        return self._path / f"{digest}{PREFIX_SUFFIX}"

    def _count(self, digest: str, file_bytes: int) -> None:
        self.usage += file_bytes - self._sizes.pop(digest, 0)
        if file_bytes:
            self._sizes[digest] = file_bytes


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
