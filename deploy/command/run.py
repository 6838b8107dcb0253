"""`roundhouse run`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.command.endpoint import Host, Port, endpoint

if TYPE_CHECKING:
    from deploy.agents.profiles import Endpoint

PROGRAM = "roundhouse run"
LOAD_S_MAX = 3600.0
"""Longest wait for a model. It includes the download."""
LOOK_S = 0.5
STOP_S_MAX = 90.0
"""Longest wait for the server's end: `serve` itself kills its processes earlier."""


class RunError(Exception):
    """The model cannot be served; the message says why."""


def run(
    model: Annotated[
        str | None,
        typer.Argument(help="Model id or folder (default: the embedded pocket model).", show_default=False),
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A question; without one, start a conversation.", show_default=False),
    ] = None,
    host: Host = None,
    port: Port = None,
) -> None:
    """Chat with a model. If no server serves it, start one, and stop that one at the end.

    The model is downloaded if it is not on this machine. `roundhouse serve` keeps it for other clients.
    """
    from deploy.agents.models import LaunchError
    from deploy.command.chat import chat
    from protocol.settings import reader as settings

    try:
        with _served(endpoint(None, host, port, None), model) as name:
            chat(words=words, model=name, host=host, port=port)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (LaunchError, RunError, settings.SettingsError, OSError) as error:
        settings.exit_with(PROGRAM, error)


@contextlib.contextmanager
def _served(found: Endpoint, model: str | None) -> Iterator[str]:
    """Yield the name of the model, served at the endpoint while the context is open. Raises `RunError`."""
    from deploy.agents.models import LaunchError, choose
    from deploy.console.http import models_of
    from deploy.serving import models
    from deploy.serving.preflight import free_port_beyond, is_taken

    host, port = address(found)
    name = models.model_of_flag(model).name
    if not is_taken(host, port):
        with server(found, model, name):
            yield name
        return
    try:
        chosen = choose(models_of(found), name)
    except LaunchError as error:
        other = free_port_beyond(host, port)
        raise RunError(f"{error}; to serve it beside that one, use --port {other}") from None
    yield chosen.id


@contextlib.contextmanager
def server(found: Endpoint, model: str | None, name: str) -> Iterator[None]:
    """Run `serve` while the context is open; it ends itself if this process is killed. Raises `RunError`."""
    from deploy.serving.commandlines import python_module
    from protocol import lifeline
    from protocol.common.model_folder import POCKET

    host, port = address(found)
    flags = [f"--host={host}", f"--port={port}", "--log-level=warning"]
    flags += [f"--model={model}"] if name != POCKET else []
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [*python_module("deploy"), "serve", *flags],
        stdin=subprocess.DEVNULL,
        env={**os.environ, lifeline.VARIABLE: str(reader)},
        pass_fds=[reader],
        start_new_session=True,  # Ctrl-C is for the chat
    )
    os.close(reader)
    try:
        _await_loaded(process, found, name, time.monotonic() + LOAD_S_MAX)
        yield
    finally:
        os.close(writer)
        _end(process)


def _await_loaded(
    process: subprocess.Popen[bytes], found: Endpoint, name: str, deadline: float, look_s: float = LOOK_S
) -> None:
    from deploy.agents.models import LaunchError, choose
    from deploy.agents.profiles import NO_KEY
    from deploy.console.http import models_of
    from deploy.serving.startup_progress import StartupProgress, terminal

    draw, keys = terminal(), [] if found.key == NO_KEY else [found.key]
    if draw is not None:
        draw(f"Starting a server for {name} …")
    with StartupProgress(found.url, keys, draw, greet=lambda _: ""):
        while True:
            with contextlib.suppress(LaunchError):
                if choose(models_of(found), name).loaded:
                    break
            if time.monotonic() > deadline:
                raise RunError(f"{name} was not loaded within {LOAD_S_MAX:g} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(look_s)
                raise RunError(f"{name} cannot be served: serve ended with status {status}")
    if draw is not None:
        draw("\r\x1b[K")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def address(found: Endpoint) -> tuple[str, int]:
    from urllib.parse import urlsplit

    from deploy.serving.settings import GATEWAY

    parts = urlsplit(found.url)
    return parts.hostname or GATEWAY.host, parts.port or GATEWAY.port
