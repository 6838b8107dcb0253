"""Our folder in the user's cache folder, and the prefix cache in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PREFIX_SUFFIX = ".prefix.safetensors"
"""Suffix of the files of the prefix cache; each model has a folder of them."""


def cache_folder(environ: Mapping[str, str], platform: str) -> Path:
    """Return our folder in the user's cache folder."""
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "roundhouse"
    # The XDG base directory specification requires that relative paths are ignored.
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "roundhouse"


def prefix_folder(named: Path | None, environ: Mapping[str, str], platform: str) -> Path:
    """Return the folder of the prefix cache on disk. `named`: by a setting."""
    return named or cache_folder(environ, platform) / "prefixes"
