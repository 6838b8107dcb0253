"""`roundhouse service`: install, remove, status."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from deploy.command.endpoint import exit_on_errors


def install(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files without installing.")] = False,
    user: Annotated[
        str | None, typer.Option(help="With sudo on macOS: run at boot, without a login, as this user.")
    ] = None,
) -> None:
    """Start gateway and worker at login and keep them running. Accepts the flags of roundhouse serve."""
    from deploy.units import jobs, service
    from deploy.units.manager import ServiceError
    from protocol.common.api_keys import KeysError

    with exit_on_errors(service.PROGRAM, ServiceError, KeysError):
        manager = service.manager_here(user)
        with manager.acting():
            wanted = jobs.read(context.args, os.environ)
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
    from deploy.units.manager import ServiceError

    with exit_on_errors(service.PROGRAM, ServiceError):
        manager = service.manager_here()
        names = service.remove(manager)
        typer.echo("\n".join(f"removed {manager.folder / name}" for name in names) or "nothing was installed")


def status() -> None:
    """Show the installed jobs, when they started and how they last ended. Status 1 unless all are running."""
    from deploy.units import service
    from deploy.units.manager import ServiceError

    with exit_on_errors(service.PROGRAM, ServiceError):
        lines, runs = service.status(service.manager_here())
    typer.echo("\n".join(lines))
    raise typer.Exit(0 if runs else 1)
