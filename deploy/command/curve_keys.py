"""`roundhouse curve-keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PROGRAM = "roundhouse curve-keys"
KEY_FILES = ("gateway.key", "gateway.key_secret", "worker.key", "worker.key_secret")


def curve_keys(
    folder: Annotated[Path, typer.Argument(help="Folder for the keys; created if it does not exist.")],
) -> None:
    """Create CURVE keys of gateway and worker, for a tcp:// endpoint that is not on loopback."""
    from protocol import sockets
    from protocol.settings import reader as settings

    if existing := [name for name in KEY_FILES if (folder / name).exists()]:
        settings.exit_with(PROGRAM, f"{folder} already contains {', '.join(existing)}")
    try:
        sockets.write_keys(folder)
    except OSError as error:
        settings.exit_with(PROGRAM, error)
    typer.echo(f"keys of gateway and worker are in {folder}; everyone who can read them can connect")
