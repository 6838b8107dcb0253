"""`roundhouse serve`, and its processes by themselves: `roundhouse gateway` and `roundhouse worker`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from socket import socket
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from deploy.serving.resolution import Resolved
    from deploy.supervisor.child import Child, ServedModel
    from deploy.supervisor.reloading import Reloading

STOP_S_MAX = 60.0
"""Time to stop everything when the parent, a `roundhouse run`, has ended."""


def serve(context: typer.Context) -> None:
    """Serve models in the foreground: a gateway, and a worker for each model, restarted when they die.

    Several models are loaded on demand. Ctrl-C stops all.

    \b
    roundhouse serve --model mlx-community/Qwen3-4B-4bit
    roundhouse serve --model small=~/models/small --model large=~/models/large
    roundhouse serve --config roundhouse.toml --api-keys-file keys.txt

    \b
    Every flag is also a variable (--max-running is ROUNDHOUSE_MAX_RUNNING) and
    a key under \\[serve] in the file named by --config (max_running). A flag
    overrides a variable, a variable overrides the file. Settings of one model
    are in the file, under \\[models.NAME]: model, aliases, resident, and every
    setting of a worker.
    """
    from protocol.settings.job_status import exits_for_manager

    with exits_for_manager():
        raise SystemExit(_serve(context.args))


def _serve(words: Sequence[str]) -> int:
    """Return the exit status; errors of the start exit."""
    from deploy.machine import hub
    from deploy.serving import clients
    from deploy.serving.commandlines import children_of
    from deploy.serving.preflight import (
        ModelError,
        PortError,
        check_models,
        check_port,
        open_listener,
        take_lock,
    )
    from deploy.serving.resolution import resolve
    from deploy.serving.settings import PROGRAM
    from deploy.supervisor.memory import fits_beside
    from deploy.supervisor.reloading import Reloading
    from protocol import lifeline, sockets
    from protocol.settings import reader as settings
    from protocol.settings.reader import SettingsError

    lifeline.follow_parent(STOP_S_MAX)
    lock = None
    try:
        resolved = resolve(words, os.environ)
        gateway, address = resolved.gateway, (resolved.gateway.host, resolved.gateway.port)
        check_models(resolved.models, hub.check_reachable)
        lock = take_lock(PROGRAM, *address)
        check_port(*address, os.environ)
        sockets.check_unused(gateway.endpoint)
        keys = clients.new_keys(gateway)
        listener = open_listener(*address, os.environ)
    except (SettingsError, sockets.EndpointError, ModelError, PortError, hub.HubError, OSError) as error:
        if lock is not None:
            lock.release()
        settings.exit_with(PROGRAM, error)
    # The address is that of the start: the listening socket and the files of this server are named after it.
    at_start = [f"--host={gateway.host}", f"--port={gateway.port}", f"--endpoint={gateway.endpoint}"]

    def read_again() -> list[Child]:
        return children_of(resolve([*words, *at_start], os.environ), os.environ, keys)

    control = sockets.control_path(gateway.server)
    limits = resolved.drain_timeout_s, resolved.serve.ready_timeout_s
    status = _supervise(resolved, Reloading(control, *limits, fits_beside, read_again), keys, listener)
    with contextlib.suppress(sockets.EndpointError, OSError):
        sockets.remove_stale(sockets.default_path(gateway.server))  # of a gateway that was killed
    lock.release()
    logging.getLogger(__name__).info("all stopped, exit status %d", status)
    return status


def _supervise(
    resolved: Resolved, reloading: Reloading, own_keys: Sequence[str], listener: socket | None
) -> int:
    """Run the processes until a stop, with log lines or, at a terminal, a greeting. Return the status."""
    from deploy.serving import clients
    from deploy.serving.commandlines import children_of
    from deploy.serving.prefix_cache import first_start_notice, folders
    from deploy.serving.startup_progress import (
        StartupProgress,
        announcement,
        first_loads,
        greeting,
        is_quiet,
        terminal,
    )
    from deploy.supervisor.machine_crash import crash_logged
    from deploy.supervisor.stderr import QuietTerminal
    from deploy.supervisor.supervisor import Supervisor
    from protocol.common import logs

    given, served = resolved.serve, resolved.models
    url = clients.url(resolved.gateway.host, resolved.gateway.port)
    keys = own_keys or clients.keys(resolved.gateway)
    draw = terminal() if given.log_format != "json" else None
    quiet = is_quiet(given, to_terminal=draw is not None)
    greets = quiet and given.log_level is None
    draw = None if quiet and not greets else draw
    logs.setup("serve", given.log_format or "text", given.log_level or ("warning" if quiet else "info"))
    log = logging.getLogger(__name__)
    log.info("%s", announcement(url, served))
    written = folders(resolved.first_plans, os.environ)
    notices, greet = [first_start_notice(written), _model_hint(served)], None
    for notice in filter(None, notices):
        log.info("%s", notice)
    if draw is not None and greets:
        draw("".join(f"{notice}\n" for notice in notices if notice))
        draw(f"Roundhouse is {first_loads(served)}\n")
        greet = partial(greeting, url=url, served=served, needs_key=bool(keys))
    supervisor = Supervisor(
        children_of(resolved, os.environ, own_keys),
        stop_timeout_s=given.stop_timeout_s,
        limits=given.restart_limits(),
        reloading=reloading,
        memory_budget=given.memory_budget,
        spare=given.spare > 0,
        quiet=QuietTerminal() if quiet else None,
        listener=listener,
    )
    with crash_logged(os.environ, sys.platform), StartupProgress(url, keys, draw, greet):
        return supervisor.run()


def _model_hint(served: Sequence[ServedModel], platform: str = sys.platform) -> str:
    """Return which model a Mac could run, if none was named."""
    if platform != "darwin" or any(model.model is not None for model in served):
        return ""
    from deploy.machine import facts, suggestions

    room = facts.read_memory(platform).for_model
    return suggestions.first_model_hint(suggestions.models_that_fit(room, facts.chip_name(platform)))


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
