"""Job of a worker that has a spare: `python -m deploy.units.worker_with_spare … -- COMMAND`.

No service manager supports spares. This process therefore supervises the worker and its spare inside one
job, as `serve` does; `roundhouse reload` reaches it as it would reach `serve`. It restarts the worker itself.
When it gives up it exits with status 0, so that the service manager does not restart it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deploy.serving.commandlines import python_module
from deploy.supervisor.child import Child, ServedModel
from deploy.supervisor.lifecycle import EXIT_GAVE_UP
from deploy.supervisor.machine_crash import crash_logged
from deploy.supervisor.memory import fits_beside
from deploy.supervisor.reloading import Reloading
from deploy.supervisor.restarts import RestartLimits
from deploy.supervisor.supervisor import Supervisor
from protocol import sockets
from protocol.common import logs
from protocol.common.state_folder import DEFAULT_HOST, server_name
from protocol.settings import reader as settings

PROGRAM = "roundhouse service"
NAME = "worker"


def command(
    argv: Sequence[str],
    *,
    address: tuple[str, int],
    model: ServedModel,
    stop_timeout_s: float,
    ready_timeout_s: float,
    limits: RestartLimits,
    log_format: logs.Format | None,
    log_level: logs.Level | None,
) -> list[str]:
    """Return the command line that supervises the worker `argv`. `address`: host and port of its
    gateway."""
    flags = {
        "host": address[0],
        "port": address[1],
        "name": model.name,
        "model": model.model or "",
        "stop-timeout": stop_timeout_s,
        "ready-timeout": ready_timeout_s,
        "deaths-max": limits.deaths_max,
        "restart-delay-max": limits.delay_s_max,
        "log-format": log_format or "text",
        "log-level": log_level or "info",
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    return [*python_module("deploy.units.worker_with_spare"), *words, "--", *argv]


def main() -> NoReturn:
    """Keep the worker running until stopped."""
    told = _parser().parse_args()
    logs.setup("service", told.log_format, told.log_level)
    try:
        path = sockets.control_path(server_name(told.host, told.port))
    except (sockets.EndpointError, OSError) as error:
        settings.exit_with(PROGRAM, error)
    with crash_logged(os.environ, sys.platform):
        status = _supervisor(told, path).run()
    if status == EXIT_GAVE_UP:
        logging.getLogger(__name__).error("giving up; `roundhouse service install` starts it again")
        status = 0
    sys.exit(status)


def _supervisor(told: argparse.Namespace, path: Path) -> Supervisor:
    served = ServedModel(name=told.name, model=told.model or None)
    return Supervisor(
        [Child(NAME, told.command, dict(os.environ), model=served)],
        stop_timeout_s=told.stop_timeout,
        limits=RestartLimits(deaths_max=told.deaths_max, delay_s_max=told.restart_delay_max),
        # `stop_timeout_s` already includes the time to drain.
        reloading=Reloading(path, 0.0, told.ready_timeout, fits_beside),
        spare=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.units.worker_with_spare", allow_abbrev=False)
    parser.add_argument("--host", default=DEFAULT_HOST)  # jobs of earlier versions have none
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", default="")
    for name in ("--stop-timeout", "--ready-timeout", "--restart-delay-max"):
        parser.add_argument(name, type=float, required=True)
    parser.add_argument("--deaths-max", type=int, required=True)
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("command", nargs="+")
    return parser


if __name__ == "__main__":
    main()
