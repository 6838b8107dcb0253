"""`roundhouse reload`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.command.endpoint import Config, Host, Port, exit_on_errors, flags_of

if TYPE_CHECKING:
    from deploy.supervisor.reloading import ReloadOrder

PROGRAM = "roundhouse reload"


def reload(
    host: Host = None,
    port: Port = None,
    config: Config = None,
    model: Annotated[
        str | None, typer.Option(help="Model to reload, by the name that clients use (default: all).")
    ] = None,
    swap_for: Annotated[
        str | None,
        typer.Option("--with", help="Other model, an id or a folder, to serve under that name from now on."),
    ] = None,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="Reload the gateway instead: after an upgrade of Roundhouse.")
    ] = False,
) -> None:
    """Replace workers, or the gateway, of a running serve by new processes.

    A new worker starts beside the old one if memory allows, otherwise after it, and continues its requests.
    If it does not become ready, the old one stays. Exits with status 1 if a worker was not replaced. If the
    model is replaced by another, the old worker finishes its requests. Settings are read again, but --with
    lasts until serve ends, so change the TOML file too. Under a service manager with --spare 0, the old
    worker ends first, and requests get a 503 until the new one is ready. With --gateway, the old gateway
    first finishes what it has, up to --drain-timeout, while clients that connect wait; answers in the
    background, batches and requests with an Idempotency-Key go on.
    """
    from deploy.serving.resolution import resolve_gateway
    from deploy.supervisor.control import ControlError
    from deploy.supervisor.reloading import ReloadOrder
    from deploy.units.manager import ServiceError
    from protocol.settings.reader import SettingsError

    with exit_on_errors(PROGRAM, ControlError, ServiceError):
        if gateway and (model is not None or swap_for is not None):
            raise SettingsError("--gateway reloads no model: leave --model and --with out")
        order = ReloadOrder(model, swap_for and _from_here(swap_for), gateway)
        found = resolve_gateway(flags_of(host, port, config), os.environ)
        done, text = _order_reload(found.host, found.port, order)
    typer.echo(text, err=not done)
    raise typer.Exit(0 if done else 1)


def _from_here(model: str) -> str:
    """Return a model folder as an absolute path: `serve` may run in another folder."""
    from protocol.common.model_folder import POCKET, folder_of

    # Links stay links: what they lead to may change again.
    return str(folder_of(model).absolute()) if model != POCKET and folder_of(model).exists() else model


def _order_reload(host: str, port: int, order: ReloadOrder) -> tuple[bool, str]:
    from deploy.supervisor import control
    from deploy.supervisor.reloading import ReloadOrder
    from deploy.units import service
    from protocol import server_lock, sockets
    from protocol.common.state_folder import server_name

    try:
        return control.order(sockets.control_path(server_name(host, port)), order)
    except control.NoSupervisorError:
        if order in (ReloadOrder(), ReloadOrder(gateway=True)) and (
            names := service.reload(service.manager_here(), gateway=order.gateway)
        ):
            return True, f"restarted {', '.join(names)}"
        raise control.ControlError(
            f"no `roundhouse serve` is listening at {host}, port {port}{server_lock.running_servers()}"
        ) from None
