"""What the worker makes of its settings on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from protocol.workersettings import WorkerSettings


def prefix_folder(settings: WorkerSettings) -> Path:
    """Where prefixes are kept on disk."""
    return settings.prefix_cache_dir or cache_folder(os.environ, sys.platform) / "prefixes"


def cache_folder(environ: Mapping[str, str], platform: str) -> Path:
    """Where a user's programs keep what they can make again: ours below it."""
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "roundhouse"
    # A relative path there is to be ignored, says the XDG base directory specification.
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "roundhouse"
