"""The gateway's journal, as seen from outside of the gateway that writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from protocol.common.state_folder import JOURNAL_NAME, journal_folder
from protocol.settings.gateway import GatewaySettings

_PARTS = ("", "-wal", "-shm", "-journal")
"""Suffixes of what SQLite keeps beside the file."""


def path(gateway: GatewaySettings, environ: Mapping[str, str]) -> Path:
    """Return the journal's file. Raises `RuntimeError` if there is no home."""
    return (gateway.journal_dir or journal_folder(environ, gateway.server)) / JOURNAL_NAME


def size(file: Path) -> int:
    """Return the bytes of the journal on disk. Raises `OSError`."""
    return sum(part.stat().st_size for part in _parts(file))


def clear(file: Path) -> int:
    """Delete the journal; return its bytes. A gateway that runs begins a new one. Raises `OSError`."""
    total = size(file)
    for part in _parts(file):
        part.unlink(missing_ok=True)
    return total


def _parts(file: Path) -> list[Path]:
    named = [file.with_name(file.name + suffix) for suffix in _PARTS]
    return [part for part in named if part.exists()]
