"""`roundhouse service`: install, remove, status."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated

import typer


def install(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files and change nothing.")] = False,
) -> None:
    """Start gateway and worker at login and keep them running. Takes the flags of serve: see serve --help."""
    from deploy.units import jobs, service

    with _service_errors():
        manager, wanted = service.manager_here(), jobs.read(context.args, os.environ)
        if dry_run:
            for name, text in manager.files(jobs.masked(wanted)).items():
                typer.echo(f"# {manager.folder / name}\n{text}")
            return
        changed = service.install(manager, wanted)
        typer.echo(
            "\n".join(f"installed {manager.folder / name}" for name in changed) or "nothing has changed"
        )
        typer.echo(manager.hint())


def remove() -> None:
    """Stop what is installed and remove all of it."""
    from deploy.units import service

    with _service_errors():
        manager = service.manager_here()
        names = service.remove(manager)
        typer.echo("\n".join(f"removed {manager.folder / name}" for name in names) or "nothing was installed")


def status() -> None:
    """Say what is installed, what runs, since when, and how it last ended. Status 1 unless all runs."""
    from deploy.units import service

    with _service_errors():
        lines, runs = service.status(service.manager_here())
    typer.echo("\n".join(lines))
    raise typer.Exit(0 if runs else 1)


@contextlib.contextmanager
def _service_errors() -> Iterator[None]:
    from deploy.units import service
    from deploy.units.manager import ServiceError
    from protocol import settings, sockets

    try:
        yield
    except (settings.SettingsError, sockets.EndpointError, ServiceError, OSError) as error:
        settings.exit_with(service.PROGRAM, error)
