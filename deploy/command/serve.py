"""`roundhouse serve`."""

from __future__ import annotations

import logging
import os

import typer

from deploy.serving import clients
from deploy.serving import serve as serving
from deploy.serving.announcement import announcement
from deploy.serving.settings import PROGRAM
from deploy.supervisor import control
from deploy.supervisor.supervisor import Supervisor
from protocol import logs, settings, sockets


def serve(context: typer.Context) -> None:
    """Run the gateway and a worker for each model, supervised, in the foreground."""
    try:
        given, children = serving.read(context.args, os.environ)
        path = control.path_for(serving.port(context.args, os.environ))
        url = clients.url(context.args, os.environ)
    except (settings.SettingsError, sockets.EndpointError, OSError) as error:
        settings.exit_with(PROGRAM, str(error))
    logs.setup("serve", given.log_format or "text", given.log_level or "info")
    models = [child.model for child in children if child.model is not None]
    logging.getLogger(__name__).info("%s", announcement(url, models))
    status = Supervisor(
        children,
        stop_timeout_s=given.stop_timeout_s,
        limits=given.restart_limits(),
        reloading=given.reloading(path),
        memory_budget=given.memory_budget,
        spare=given.spare > 0,
    ).run()
    logging.getLogger(__name__).info("all stopped, exit status %d", status)
    raise typer.Exit(status)
