"""Values derived from the worker's settings: folders, settings of several ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from protocol.worker_settings import WorkerSettings


def prefix_folder(settings: WorkerSettings) -> Path:
    """Return the folder of the prefix cache on disk."""
    return settings.prefix_cache_dir or cache_folder(os.environ, sys.platform) / "prefixes"


SET_STALL_S_MAX = 20.0
"""Default stall timeout of several ranks. A rank that waits for a lost peer never continues by itself."""


def of_set(settings: WorkerSettings) -> WorkerSettings:
    """Return the settings adapted to several ranks: no prefix cache on disk, and a shorter stall timeout."""
    stall_s = settings.stall_timeout_s or SET_STALL_S_MAX
    return msgspec.structs.replace(settings, stall_timeout_s=stall_s, prefix_cache_disk=0)


def cache_folder(environ: Mapping[str, str], platform: str) -> Path:
    """Return our folder in the user's cache folder."""
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "roundhouse"
    # The XDG base directory specification requires that relative paths are ignored.
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "roundhouse"
