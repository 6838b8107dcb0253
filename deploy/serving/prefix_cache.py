"""The prefix cache on disk, as seen from outside of the workers that write it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from protocol.common.cache_folder import PREFIX_SUFFIX, prefix_folder
from protocol.settings.reader import spell_size
from protocol.settings.worker import WorkerSettings

_ASIDE_SUFFIX = ".part"
ASIDE_AGE_S_MAX = 600.0
"""Age beyond which a temporary file is abandoned; a younger one may be in use by a worker."""


@dataclass(frozen=True, slots=True)
class ModelPrefixes:
    """Stored prefixes of one model. `fingerprint`: of its weights. `oldest_at`, `newest_at`: Unix times."""

    fingerprint: str
    files: int
    bytes: int
    oldest_at: float
    newest_at: float


def folders(workers: Iterable[WorkerSettings], environ: Mapping[str, str]) -> dict[Path, int]:
    """Return the folders that workers write, each with its limit in bytes for each model."""
    found: dict[Path, int] = {}
    for worker in workers:
        if worker.prefix_cache_disk and worker.prefix_cache_ram != 0 and worker.hosts is None:
            folder = prefix_folder(worker.prefix_cache_dir, environ, sys.platform).absolute()
            found[folder] = max(found.get(folder, 0), worker.prefix_cache_disk)
    return found


def first_start_notice(written: Mapping[Path, int]) -> str:
    """Return what `serve` says once, at the start that creates a folder; "" if all exist.

    Creates them, so that it is not said again.
    """
    new = {folder: limit for folder, limit in written.items() if not folder.exists()}
    for folder in new:
        with contextlib.suppress(OSError):  # the worker will report it
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not new:
        return ""
    where, limit_text = ", ".join(map(str, new)), spell_size(max(new.values()))
    return (
        f"prompts are kept on disk, in {where}: at most {limit_text} for each model;"
        " --prefix-cache-disk 0 turns that off, `roundhouse cache clear` deletes them;"
        " `roundhouse journal` shows what is kept of responses"
    )


def models(folder: Path) -> list[ModelPrefixes]:
    """Return what is stored, the most recently written model first; empty if there is no folder."""
    found = []
    for each in _folders(folder):
        infos = [info for file in each.glob(f"*{PREFIX_SUFFIX}") if (info := _stat(file)) is not None]
        if infos:
            times = [info.st_mtime for info in infos]
            total = sum(info.st_size for info in infos)
            found.append(ModelPrefixes(each.name, len(infos), total, min(times), max(times)))
    return sorted(found, key=lambda model: -model.newest_at)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist. Raises `OSError`."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(there).free


def clear(folder: Path, now: float) -> None:
    """Delete the stored prefixes. Raises `OSError`.

    Safe while workers run: to them a file that is gone is a miss. Their folders stay, since a worker is known
    by its folder, and so does all that has another name.
    """
    for each in _folders(folder):
        for file in each.iterdir():
            info = _stat(file)
            is_aside = file.name.endswith(_ASIDE_SUFFIX)
            if info is None or not (file.name.endswith(PREFIX_SUFFIX) or is_aside):
                continue
            if is_aside and now - info.st_mtime < ASIDE_AGE_S_MAX:
                continue
            file.unlink(missing_ok=True)


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [each for each in folder.iterdir() if each.is_dir() and not each.is_symlink()]


def _stat(file: Path) -> os.stat_result | None:
    """Return the status of a regular file; None if it is gone, or something else."""
    try:
        info = file.lstat()
    except FileNotFoundError:
        return None
    return info if stat.S_ISREG(info.st_mode) else None
