"""Our folder in the user's cache folder, and the prefix cache in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from protocol.state_folder import xdg_folder

PREFIX_SUFFIX = ".prefix.safetensors"
"""Suffix of the files of the prefix cache; each model has a folder of them."""


def cache_folder(environ: Mapping[str, str], platform: str) -> Path:
    """Return our folder in the user's cache folder. Raises `RuntimeError` if there is no home."""
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "roundhouse"
    return xdg_folder(environ, "XDG_CACHE_HOME", ".cache")


def prefix_folder(named: Path | None, environ: Mapping[str, str], platform: str) -> Path:
    """Return the folder of the prefix cache on disk. `named`: by a setting."""
    return named or cache_folder(environ, platform) / "prefixes"
