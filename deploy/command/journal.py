"""`roundhouse journal`: what the gateway keeps on disk of answers that outlive it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import typer

from deploy.command.endpoint import Config, Host, Port, flags_of

PROGRAM = "roundhouse journal"


def journal(context: typer.Context, host: Host = None, port: Port = None, config: Config = None) -> None:
    """Show the journal on disk: stored responses, and answers that outlive the gateway."""
    if context.invoked_subcommand is not None:
        return
    from deploy.console.table import size
    from deploy.serving import journal as files

    with _journal_errors():
        file = _path(flags_of(host, port, config))
        typer.echo(f"{file}: {size(files.size(file))}")


def clear(host: Host = None, port: Port = None, config: Config = None) -> None:
    """Delete the journal, with all stored responses. A server that runs begins a new one; answers that it is
    giving go on in its memory."""
    from deploy.console.table import size
    from deploy.serving import journal as files

    with _journal_errors():
        file = _path(flags_of(host, port, config))
        typer.echo(f"{file}: deleted {size(files.clear(file))}")


def _path(flags: list[str]) -> Path:
    from deploy.serving import journal as files
    from deploy.serving import serve

    _, children = serve.read(flags, os.environ)
    return files.path(children)


@contextlib.contextmanager
def _journal_errors() -> Iterator[None]:
    from protocol import sockets
    from protocol.settings import reader as settings

    try:
        yield
    except (settings.SettingsError, sockets.EndpointError, OSError, RuntimeError) as error:
        settings.exit_with(PROGRAM, error)
