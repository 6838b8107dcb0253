"""Our folder in the user's state folder: what a restart needs, and nothing cleans up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def state_folder(environ: Mapping[str, str]) -> Path:
    """Return our folder in the user's state folder, by the XDG base directory specification on every system.

    Raises `RuntimeError` if there is no home.
    """
    # The specification requires that relative paths are ignored.
    named = Path(environ.get("XDG_STATE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".local" / "state") / "roundhouse"


JOURNAL_NAME = "journal.sqlite"


def journal_folder(environ: Mapping[str, str], port: int) -> Path:
    """Return the folder of a gateway's journal. Raises `RuntimeError` if there is no home."""
    return state_folder(environ) / "journal" / str(port)
