"""`roundhouse keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PROGRAM = "roundhouse keys"
KEY_FILES = ("gateway.key", "gateway.key_secret", "worker.key", "worker.key_secret")


def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write them; made if it is not there.")],
) -> None:
    """Write the CURVE keys that gateway and worker need for a tcp:// endpoint off loopback."""
    from protocol import settings, sockets

    if existing := [name for name in KEY_FILES if (folder / name).exists()]:
        settings.exit_with(PROGRAM, f"{folder} already holds {', '.join(existing)}")
    try:
        sockets.write_keys(folder)
    except OSError as error:
        settings.exit_with(PROGRAM, error)
    typer.echo(f"Keys of both ends are in {folder}. Whoever can read them may join the line.")
