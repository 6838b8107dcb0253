"""What the worker makes of its settings on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from protocol.workersettings import WorkerSettings


def prefix_folder(settings: WorkerSettings) -> Path:
    """Where prefixes are kept on disk."""
    return settings.prefix_cache_dir or cache_folder(os.environ, sys.platform) / "prefixes"


SET_STALL_S_MAX = 20.0
"""A rank that waits for another one does not come back by itself."""


def of_set(settings: WorkerSettings) -> WorkerSettings:
    """What of a worker's settings is otherwise where several ranks run the model: nothing goes to the disk,
    and a step that takes long is given up soon."""
    stall_s = settings.stall_timeout_s or SET_STALL_S_MAX
    return msgspec.structs.replace(settings, stall_timeout_s=stall_s, prefix_cache_disk=0)


def cache_folder(environ: Mapping[str, str], platform: str) -> Path:
    """Where a user's programs keep what they can make again: ours below it."""
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "roundhouse"
    # A relative path there is to be ignored, says the XDG base directory specification.
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "roundhouse"
