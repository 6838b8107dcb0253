"""Our folders in the user's, by the XDG base directory specification: the cache, and its prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PREFIX_SUFFIX = ".prefix.safetensors"
"""Suffix of the files of the prefix cache; each model has a folder of them."""


def xdg_folder(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """Return our folder in the one that a variable names, or else in `default`, below the home.

    Raises `RuntimeError` if there is no home.
    """
    # The specification requires that relative paths are ignored.
    named = Path(environ.get(variable, ""))
    if named.is_absolute():
        return named / "roundhouse"
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    return home / default / "roundhouse"


def cache_folder(environ: Mapping[str, str], platform: str) -> Path:
    """Return our folder in the user's cache folder. Raises `RuntimeError` if there is no home."""
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "roundhouse"
    return xdg_folder(environ, "XDG_CACHE_HOME", ".cache")


def prefix_folder(named: Path | None, environ: Mapping[str, str], platform: str) -> Path:
    """Return the folder of the prefix cache on disk. `named`: by a setting."""
    return named or cache_folder(environ, platform) / "prefixes"
