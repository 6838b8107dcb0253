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
    from deploy.serving import journal as files

    with exit_on_errors(PROGRAM, RuntimeError):
        file = _path(flags_of(host, port, config))
        typer.echo(f"{file}: {size(files.size(file))}")


def clear(host: Host = None, port: Port = None, config: Config = None) -> None:
    """Delete the journal, with all stored responses. A server that runs begins a new one; answers that it is
    giving go on in its memory."""
    from deploy.console.status_screen import size
    from deploy.serving import journal as files

    with exit_on_errors(PROGRAM, RuntimeError):
        file = _path(flags_of(host, port, config))
        typer.echo(f"{file}: deleted {size(files.clear(file))}")


def _path(flags: list[str]) -> Path:
    from deploy.serving import journal as files
    from deploy.serving.resolution import resolve_gateway

    return files.path(resolve_gateway(flags, os.environ), os.environ)
