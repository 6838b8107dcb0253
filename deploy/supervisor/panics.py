"""Panics: ends of the whole machine while a worker ran, recognized at the next start.

The breadcrumbs of each worker are a named file (`*.run`) for as long as its process runs, and the supervisor
deletes it after the process, however that ends. A file that is older than the machine's boot therefore says
that the machine ended first: a kernel panic, or a loss of power, which looks the same. The model is then run
with half of the memory for caches, until a worker of it has lived for `CLEAN_RUN_S` and ended otherwise.

A supervisor that is killed leaves files too. They are locked while their processes live, so the next start in
the same boot deletes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from protocol.breadcrumbs import BYTES_MAX, BreadcrumbSlot
from protocol.cache_folder import cache_folder

log = logging.getLogger(__name__)

CACHE_SHARE = 0.5
"""Share of the memory for caches that a model gets after a panic."""
CLEAN_RUN_S = 600.0
"""Life of a worker after which an end of its process clears its model."""

_RUN, _PANIC = ".run", ".panic"
_SPARE = "spare"


class RunFile:
    """The breadcrumb slot of one process, under the key of its model."""

    def __init__(self, slot: BreadcrumbSlot, panics: Panics, model: str | None, now: float) -> None:
        self._slot, self._panics, self._model, self._since = slot, panics, model, now

    @property
    def fd(self) -> int:
        """Descriptor for the child."""
        return self._slot.fd

    def assign(self, model: str) -> None:
        """Note that the process, a spare until now, runs this model."""
        self._model, self._since = model, self._panics.clock()
        if self._slot.path is not None and (path := self._panics.path(model)) is not None:
            with contextlib.suppress(OSError):
                self._slot.path = self._slot.path.rename(path)

    def close(self) -> str:
        """Delete the file, and return its content. Call it when the process has ended."""
        if self._model is not None and self._panics.clock() - self._since >= CLEAN_RUN_S:
            self._panics.clear(self._model)
        return self._slot.close()


class Panics:
    """The models under which the machine ended. `folder`: None: ends of the machine go unnoticed."""

    def __init__(
        self, folder: Path | None = None, *, boot_at: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`boot_at`: Unix time of the machine's start. Looks for files of earlier boots."""
        self.clock = clock
        self._folder = folder
        self._numbers = itertools.count()
        if folder is not None:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._sweep(folder, boot_at)
            except OSError as error:
                log.warning("a panic of the machine would not be noticed: %s", error)
                self._folder = None

    @classmethod
    def of_machine(cls, environ: Mapping[str, str], platform: str) -> Panics:
        """Return the records of this machine. Only macOS panics under a model: elsewhere there are none."""
        if platform != "darwin":
            return cls()
        return cls(cache_folder(environ, platform) / "runs", boot_at=psutil.boot_time())

    def open_slot(self, model: str | None) -> RunFile:
        """Open the slot of a new process. `model`: None: it is a spare. Raises `OSError`."""
        return RunFile(BreadcrumbSlot(self.path(model)), self, model, self.clock())

    def path(self, model: str | None) -> Path | None:
        """Return a new path for the file of a process with this model."""
        if self._folder is None:
            return None
        key = _SPARE if model is None else _key(model)
        return self._folder / f"{key}.{os.getpid()}.{next(self._numbers)}{_RUN}"

    def caution(self, model: str) -> str:
        """Return why the model gets less memory for caches, in a sentence; empty: it gets all of it."""
        if self._folder is None:
            return ""
        try:
            last = (self._folder / f"{_key(model)}{_PANIC}").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        told = f" ({last.strip()})" if last.strip() else ""
        return (
            f"the machine ended while it ran{told}: its caches get {CACHE_SHARE:.0%} of the memory, until a"
            f" worker has run for {CLEAN_RUN_S / 60:g} minutes and ended"
        )

    def clear(self, model: str) -> None:
        """Forget the model's panic."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / f"{_key(model)}{_PANIC}").unlink()

    def _sweep(self, folder: Path, boot_at: float) -> None:
        """Turn files of earlier boots into records, and delete those of processes that are gone."""
        for file in folder.glob(f"*{_RUN}"):
            with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # its process lives
                key = file.name.split(".")[0]
                if os.fstat(opened.fileno()).st_mtime < boot_at and key != _SPARE:
                    (folder / f"{key}{_PANIC}").write_bytes(opened.read(BYTES_MAX).strip(b"\0 \n"))
                file.unlink()


def _key(model: str) -> str:
    return hashlib.sha256(model.encode()).hexdigest()[:16]
