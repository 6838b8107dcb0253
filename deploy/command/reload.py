"""`roundhouse reload`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deploy.supervisor.reloading import Order

PROGRAM = "roundhouse reload"


def reload(
    port: Annotated[int | None, typer.Option(help="Where the gateway of that serve listens.")] = None,
    config: Annotated[Path | None, typer.Option(help="The TOML file of that serve.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Which of several models, by the name that clients use; none: all.")
    ] = None,
    swap_for: Annotated[
        str | None,
        typer.Option("--with", help="Serve this model, an id or a folder, under that name from now on."),
    ] = None,
) -> None:
    """Have a running serve replace workers by new processes, without the loss of a request.

    A new worker starts beside the old one where memory allows, else after it. One that does not get ready
    leaves the old one in place. Status 1 when a worker was not replaced. Where another model takes its place,
    the old one ends the requests it has. Which models there are is read when serve starts, and not again:
    what is swapped here is to be changed in the TOML file too. As a service
    without a spare the old worker ends first, and who asks before the new one is ready gets a 503.
    """
    from deploy.serving import serve as serving
    from deploy.supervisor import control
    from deploy.supervisor.reloading import Order
    from deploy.units.manager import ServiceError
    from protocol import settings, sockets

    flags = [f"--{name}={value}" for name, value in (("port", port), ("config", config)) if value is not None]
    try:
        order = Order(model, swap_for and _from_here(swap_for))
        done, text = _order_reload(control.path_for(serving.port(flags, os.environ)), order)
    except (
        settings.SettingsError,
        sockets.EndpointError,
        control.ControlError,
        ServiceError,
        OSError,
    ) as error:
        settings.exit_with(PROGRAM, error)
    typer.echo(text, err=not done)
    raise typer.Exit(0 if done else 1)


def _from_here(model: str) -> str:
    """The folder that is meant: `serve` may have been started in another one."""
    from protocol.naming import folder_of

    return str(folder_of(model).resolve()) if folder_of(model).exists() else model


def _order_reload(path: Path, order: Order) -> tuple[bool, str]:
    from deploy.supervisor import control
    from deploy.supervisor.reloading import Order
    from deploy.units import service

    try:
        return control.order(path, order)
    except control.NobodyListensError:
        if order == Order() and (names := service.reload(service.manager_here())):
            return True, f"restarted {', '.join(names)}"
        raise
