"""`roundhouse journal`: what the gateway keeps on disk of answers that outlive it."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from deploy.command.endpoint import Config, Host, Port, exit_on_errors, flags_of

PROGRAM = "roundhouse journal"


def journal(context: typer.Context, host: Host = None, port: Port = None, config: Config = None) -> None:
    """Show the journal on disk: stored responses, and answers that outlive the gateway."""
    if context.invoked_subcommand is not None:
        return
    from deploy.console.status_screen import size

    with exit_on_errors(PROGRAM, RuntimeError):
        file, parts = _files(flags_of(host, port, config))
        typer.echo(f"{file}: {size(sum(part.stat().st_size for part in parts))}")


def clear(host: Host = None, port: Port = None, config: Config = None) -> None:
    """Delete the journal, with all stored responses. A server that runs begins a new one; answers that it is
    giving go on in its memory."""
    from deploy.console.status_screen import size

    with exit_on_errors(PROGRAM, RuntimeError):
        file, parts = _files(flags_of(host, port, config))
        total = sum(part.stat().st_size for part in parts)
        for part in parts:
            part.unlink(missing_ok=True)
        typer.echo(f"{file}: deleted {size(total)}")


def _files(flags: list[str]) -> tuple[Path, list[Path]]:
    """Return the journal, and the files that there are of it."""
    from deploy.serving.resolution import resolve_gateway
    from protocol.common.secure_files import database_files
    from protocol.common.state_folder import journal_file

    gateway = resolve_gateway(flags, os.environ)
    file = journal_file(gateway.journal_dir, os.environ, gateway.server)
    return file, database_files(file)
