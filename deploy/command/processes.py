"""`roundhouse gateway` and `roundhouse worker`: replace the command by one of the processes."""

from __future__ import annotations

import os
from typing import NoReturn

import typer


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
