"""The gateway's journal, as seen from outside of the gateway that writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deploy.serving.settings import PROGRAM
from deploy.supervisor.child import Child
from protocol.common.state_folder import JOURNAL_NAME, journal_folder
from protocol.settings import reader as settings
from protocol.settings.gateway import GatewaySettings

_PARTS = ("", "-wal", "-shm", "-journal")
"""Suffixes of what SQLite keeps beside the file."""


def path(children: Sequence[Child]) -> Path:
    """Return the journal's file. Raises `SettingsError`, or `RuntimeError` if there is no home."""
    gateway = next(child for child in children if child.model is None)
    flags = gateway.argv[gateway.argv.index("broker") + 1 :]
    read = settings.read(GatewaySettings, "gateway", flags, gateway.env, program=PROGRAM, about="")
    folder = read.journal_dir or journal_folder(gateway.env, read.server)
    return folder / JOURNAL_NAME


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
