"""Crash of the machine: an earlier supervisor's file that is older than the boot, logged at the next start.

The file is locked while its supervisor runs, which deletes it at its end, unless it is killed. A file of a
killed one is deleted at the next start in the same boot.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from protocol.common.cache_folder import cache_folder

log = logging.getLogger(__name__)

_SUFFIX = ".run"
CRASHED = (
    "the machine went down while Roundhouse ran, by a kernel panic or a loss of power; "
    "after a panic, try `--wired none` or a larger `--memory-headroom`"
)


@contextlib.contextmanager
def crash_logged(environ: Mapping[str, str], platform: str, boot_at: float | None = None) -> Iterator[None]:
    """Log a crash of the machine during an earlier run, and leave a file while this one lasts. Only macOS
    panics under a model: elsewhere this does nothing. `boot_at`: Unix time of the machine's start."""
    with contextlib.ExitStack() as stack:
        if platform == "darwin":
            try:
                folder = cache_folder(environ, platform) / "runs"
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if _has_crashed(folder, psutil.boot_time() if boot_at is None else boot_at):
                    log.warning(CRASHED)
                fd, name = tempfile.mkstemp(dir=folder, suffix=_SUFFIX)
                stack.callback(os.close, fd)
                stack.callback(Path(name).unlink, missing_ok=True)
                fcntl.flock(fd, fcntl.LOCK_EX)
                os.fsync(fd)
            except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
                log.warning("a crash of the machine would not be noticed: %s", error)
        yield


def _has_crashed(folder: Path, boot_at: float) -> bool:
    """Return whether a file is older than the boot. Delete all that no running supervisor has locked."""
    crashed = False
    for file in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError), file.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            crashed |= os.fstat(opened.fileno()).st_mtime < boot_at
            file.unlink()
    return crashed
