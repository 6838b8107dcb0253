"""`roundhouse gateway` and `roundhouse worker`: one of the processes, in place of the command."""

from __future__ import annotations

import os
from typing import NoReturn

import typer


def gateway(context: typer.Context) -> None:
    """Be the gateway process, as launchd and systemd run it. Takes its flags; see gateway --help."""
    _become("broker", context.args)


def worker(context: typer.Context) -> None:
    """Be a worker process, as launchd and systemd run it. Takes its flags; see worker --help."""
    _become("worker", context.args)


def _become(module: str, argv: list[str]) -> NoReturn:
    from deploy.serving.commandlines import python_module

    command = [*python_module(module), *argv]
    os.execv(command[0], command)
