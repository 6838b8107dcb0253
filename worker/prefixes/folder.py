"""The files of stored items: one folder, one file for each, named by its digest.

A file is written aside, synced and renamed, so that at any instant it is there whole or not at all; nothing
is believed but what its checksums vouch for. What is found damaged is removed. Another process may use the
folder as well: each removes what it must, and what is gone is a miss. Files of other names are left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from worker.prefixes.files import DamagedFileError, Draft, Record, read_header, read_record

log = logging.getLogger(__name__)

LEFTOVER_AGE_S_MAX = 600.0
"""An unfinished file as old as that is nobody's."""

DIGEST = re.compile(r"[0-9a-f]{8,128}")
_SUFFIX = ".prefix.safetensors"
_STORED = re.compile(f"({DIGEST.pattern}){re.escape(_SUFFIX)}")
_ASIDE = re.compile(rf"{DIGEST.pattern}\.(\d{{1,9}})-[0-9a-f]{{8}}\.part")


@dataclass(frozen=True, slots=True)
class Found:
    """An item that is there, by its header, and the size of its file."""

    digest: str
    about: dict[str, Any]
    file_bytes: int


class Folder:
    """Items of the model with `fingerprint` in a folder that is this model's alone. Used by one thread at a
    time. Only `save` raises anything."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path, self._fingerprint = path, fingerprint
        self._sizes: dict[str, int] = {}
        self.usage = 0
        """Bytes of the files that were found or saved, and not removed since."""
        self.name = ""
        """The machine and the folder, whatever its path; empty: it cannot be used."""
        try:
            self._make()
            path.chmod(0o700)
            found = path.stat()
            self.name = f"{os.uname().nodename}:{found.st_dev:x}:{found.st_ino:x}"
        except OSError as error:
            log.warning("no folder for stored prefixes: %s", error)

    def scan(self) -> Iterator[Found]:
        """What is there, by the headers alone. Damaged files, other models' and leftovers are removed."""
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

    def _look_at(self, digest: str) -> Iterator[Found]:
        try:
            header, size = read_header(self._file(digest), self._fingerprint, digest)
        except OSError as error:
            log.info("stored prefix %s is passed over: %s", digest, error)
        except DamagedFileError as error:
            log.info("stored prefix %s is removed: %s", digest, error)
            self.remove(digest)
        else:
            self._count(digest, size)
            yield Found(digest, header.about, size)

    def _clean_up(self, aside: Path, pid: int) -> None:
        with contextlib.suppress(OSError):
            age_s = time.time() - aside.stat().st_mtime
            # In a container our own id was our predecessor's too, and we have begun nothing yet.
            if pid == os.getpid() or age_s > LEFTOVER_AGE_S_MAX or not psutil.pid_exists(pid):
                aside.unlink()

    def read(self, digest: str) -> Record | None:
        """None: missing, or damaged and therefore removed."""
        try:
            return read_record(self._file(digest), self._fingerprint, digest)
        except FileNotFoundError:
            self._count(digest, 0)
        except (OSError, DamagedFileError, MemoryError) as error:
            log.warning("stored prefix %s is lost: %s", digest, error)
            self.remove(digest)
        return None

    def save(self, draft: Draft) -> None:
        """Raises `OSError`; then neither the file nor one that it was to replace is there."""
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
        """As far as it can be."""
        with contextlib.suppress(OSError):
            self._file(digest).unlink()
        self._count(digest, 0)

    def _make(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _sync(self) -> None:
        # Until then a loss of power may take the new name back.
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _file(self, digest: str) -> Path:
        return self._path / f"{digest}{_SUFFIX}"

    def _count(self, digest: str, file_bytes: int) -> None:
        self.usage += file_bytes - self._sizes.pop(digest, 0)
        if file_bytes:
            self._sizes[digest] = file_bytes


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
