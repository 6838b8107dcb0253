"""`roundhouse keys`: API keys, in the file that the gateway reads again when it changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from deploy.command.endpoint import exit_on_errors

PROGRAM = "roundhouse keys"

File = Annotated[
    Path | None,
    typer.Option(help="File of the keys (default: that of serve, or ~/.config/roundhouse/api-keys)."),
]
Config = Annotated[Path | None, typer.Option(help="TOML file of the serve that reads the keys.")]


def create(
    name: Annotated[str, typer.Argument(help="Owner; keys of one name share cached prefixes.")],
    max_concurrent: Annotated[
        int | None,
        typer.Option(min=1, max=999_999_999, help="Limit of requests in flight (default: --max-per-key)."),
    ] = None,
    file: File = None,
    config: Config = None,
) -> None:
    """Create an API key and print it. Only its hash is stored, so it cannot be shown again."""
    from deploy.serving import key_file
    from protocol.common.api_keys import KeysError

    with exit_on_errors(PROGRAM, KeysError):
        path = key_file.path_of(file, config, os.environ)
        is_new = not path.exists()
        text = key_file.create(path, name, max_concurrent)
        typer.echo(text)
        typer.echo(f"keep this key of {name}: only its hash is in {path}", err=True)
        if is_new:
            is_read = path == key_file.path_of(None, config, os.environ)
            flag = "" if is_read else f" with --api-keys-file {path}"
            typer.echo(f"from its next start{flag} on, `roundhouse serve` requires a key", err=True)


def show(file: File = None, config: Config = None) -> None:
    """List the API keys: id, name, and limit of requests in flight."""
    from deploy.serving import key_file
    from protocol.common.api_keys import KeysError

    with exit_on_errors(PROGRAM, KeysError):
        for key in key_file.keys(key_file.path_of(file, config, os.environ)):
            limit = "" if key.concurrent_max is None else f"  at most {key.concurrent_max} in flight"
            typer.echo(f"{key.id}  {key.name}{limit}")


def revoke(
    which: Annotated[str, typer.Argument(metavar="NAME", help="Name, for all keys of it, or the id of one.")],
    file: File = None,
    config: Config = None,
) -> None:
    """Revoke API keys. A running gateway refuses them from its next request on."""
    from deploy.serving import key_file
    from protocol.common.api_keys import KeysError

    with exit_on_errors(PROGRAM, KeysError):
        for key in key_file.revoke(key_file.path_of(file, config, os.environ), which):
            typer.echo(f"revoked {key.id}  {key.name}")


# --- `roundhouse curve-keys` -------------------------------------------------------------------------

CURVE_PROGRAM = "roundhouse curve-keys"
KEY_FILES = ("gateway.key", "gateway.key_secret", "worker.key", "worker.key_secret")


def curve_keys(
    folder: Annotated[Path, typer.Argument(help="Folder for the keys; created if it does not exist.")],
) -> None:
    """Create CURVE keys of gateway and worker, for a tcp:// endpoint that is not on loopback."""
    from protocol import sockets
    from protocol.settings import reader as settings

    if existing := [name for name in KEY_FILES if (folder / name).exists()]:
        settings.exit_with(CURVE_PROGRAM, f"{folder} already contains {', '.join(existing)}")
    try:
        sockets.write_keys(folder)
    except OSError as error:
        settings.exit_with(CURVE_PROGRAM, error)
    typer.echo(f"keys of gateway and worker are in {folder}; everyone who can read them can connect")
