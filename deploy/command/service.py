"""`roundhouse service`: install, remove, status."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated

import typer


def install(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files without installing.")] = False,
) -> None:
    """Start gateway and worker at login and keep them running. Accepts the flags of roundhouse serve."""
    from deploy.units import jobs, service

    with _service_errors():
        manager, wanted = service.manager_here(), jobs.read(context.args, os.environ)
        if dry_run:
            for name, text in manager.files(jobs.masked(wanted)).items():
                typer.echo(f"# {manager.folder / name}\n{text}")
            return
        changed = service.install(manager, wanted)
        typer.echo(
            "\n".join(f"installed {manager.folder / name}" for name in changed) or "the files are unchanged"
        )
        typer.echo(manager.hint())


def remove() -> None:
    """Stop and remove the installed service."""
    from deploy.units import service

    with _service_errors():
        manager = service.manager_here()
        names = service.remove(manager)
        typer.echo("\n".join(f"removed {manager.folder / name}" for name in names) or "nothing was installed")


def status() -> None:
    """Show the installed jobs, when they started and how they last ended. Status 1 unless all are running."""
    from deploy.units import service

    with _service_errors():
        lines, runs = service.status(service.manager_here())
    typer.echo("\n".join(lines))
    raise typer.Exit(0 if runs else 1)


@contextlib.contextmanager
def _service_errors() -> Iterator[None]:
    from deploy.units import service
    from deploy.units.manager import ServiceError
    from protocol import sockets
    from protocol.settings import reader as settings

    try:
        yield
    except (settings.SettingsError, sockets.EndpointError, ServiceError, OSError) as error:
        settings.exit_with(service.PROGRAM, error)
