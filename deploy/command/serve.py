"""`roundhouse serve`, and its processes by themselves: `roundhouse gateway` and `roundhouse worker`."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import NoReturn

import typer


def serve(context: typer.Context) -> None:
    """Run the gateway and a worker for each model, supervised, in the foreground."""
    from deploy.machine import hub
    from deploy.serving import clients
    from deploy.serving import serve as serving
    from deploy.serving.prefix_cache import first_start_notice, folders
    from deploy.serving.preflight import ModelError, PortError, check_models, check_port
    from deploy.serving.settings import PROGRAM
    from deploy.serving.startup_progress import StartupProgress, announcement, terminal
    from deploy.supervisor.supervisor import Supervisor
    from protocol import logs, settings, sockets
    from protocol.settings import SettingsError

    try:
        given, children = serving.read(context.args, os.environ)
        port = serving.port(context.args, os.environ)
        path = sockets.control_path(port)
        check_models(models := [each.model for each in children if each.model], hub.check_reachable)
        check_port(clients.host(context.args, os.environ), port, os.environ)
        url = clients.url(context.args, os.environ)
        children[0], keys = clients.gateway_with_key(children[0], context.args, os.environ)
    except (SettingsError, sockets.EndpointError, ModelError, PortError, hub.HubError, OSError) as error:
        settings.exit_with(PROGRAM, error)
    logs.setup("serve", given.log_format or "text", given.log_level or "info")
    log = logging.getLogger(__name__)
    log.info("%s", announcement(url, models))
    if notice := first_start_notice(folders(children)):
        log.info("%s", notice)
    supervisor = Supervisor(
        children,
        stop_timeout_s=given.stop_timeout_s,
        limits=given.restart_limits(),
        reloading=given.reloading(path),
        memory_budget=given.memory_budget,
        spare=given.spare > 0,
    )
    with StartupProgress(url, keys, terminal() if given.log_format != "json" else None):
        status = supervisor.run()
    with contextlib.suppress(sockets.EndpointError, OSError):
        sockets.remove_stale(sockets.default_path(port))  # of a gateway that was killed
    log.info("all stopped, exit status %d", status)
    raise typer.Exit(status)


def gateway(context: typer.Context) -> None:
    """Run the gateway process, as launchd and systemd do. For its flags: roundhouse gateway --help."""
    _become("broker", context.args)


def worker(context: typer.Context) -> None:
    """Run a worker process, as launchd and systemd do. For its flags: roundhouse worker --help."""
    _become("worker", context.args)


def _become(module: str, argv: list[str]) -> NoReturn:
    from deploy.serving.commandlines import python_module

    command = [*python_module(module), *argv]
    os.execv(command[0], command)
