"""Checks before anything is started: the port is free, and the model can be loaded. Errors say what to do."""

from __future__ import annotations

import errno
import json
import os
import socket
import urllib.request
from collections.abc import Callable, Mapping, Sequence

from deploy.serving.clients import url
from deploy.supervisor.child import ServedModel
from deploy.supervisor.memory import weight_bytes
from protocol.common.listening import listen
from protocol.common.model_folder import is_folder, problem_with
from protocol.server_lock import OwnedError, ServerLock

PORTS_TRIED_MAX = 100
ANSWER_S_MAX = 2.0


class ModelError(Exception):
    """The model cannot be loaded; the message says what to do."""


def check_models(models: Sequence[ServedModel], reach: Callable[[str], object]) -> None:
    """Raise `ModelError` if the model cannot be loaded, or `OSError` if its folder cannot be read.

    Several models are not checked: one that cannot be loaded must not keep the others from being served.
    Neither is one with a fallback. `reach`: raises an error if the hub does not have a model that is not on
    this machine.
    """
    if len({model.name for model in models}) != 1 or models[0].model is None:
        return
    model = models[0].model
    if is_folder(model):
        if why := problem_with(model):
            raise ModelError(why)
    elif not models[0].fallback and weight_bytes(model) is None:
        reach(model)


class PortError(Exception):
    """The port is in use; the message says by which program, if known, and what to do."""


def take_lock(program: str, host: str, port: int) -> ServerLock:
    """Own the state of the server at this address. Raises `PortError`, `EndpointError` or `OSError`."""
    try:
        return ServerLock(program, host, port)
    except OwnedError as error:
        raise PortError(
            f"port {port} is in use by another Roundhouse: {error}; {_instead(host, port)}"
        ) from None


def check_port(host: str, port: int, environ: Mapping[str, str]) -> None:
    """Raise `PortError` if the port is in use. Other errors of an address are reported by the gateway."""
    if _is_activated(environ):
        return
    if not is_taken(host, port):
        return
    instead = _instead(host, port)
    if is_ours(host, port):
        raise PortError(f"port {port} is in use by another Roundhouse (see `roundhouse status`); {instead}")
    raise PortError(f"port {port} is in use by another program: stop that program, or {instead}")


def _instead(host: str, port: int) -> str:
    other = free_port_beyond(host, port)
    return f"use --port {other}, which is free" if other else "use another --port"


def open_listener(host: str, port: int, environ: Mapping[str, str]) -> socket.socket | None:
    """Open the socket on which every gateway of this server listens for clients. None: a service manager does
    that, or the address cannot be used, which the gateway reports."""
    if _is_activated(environ):
        return None
    try:
        return listen(host, port)
    except (OSError, ValueError, OverflowError):
        return None


def _is_activated(environ: Mapping[str, str]) -> bool:
    """Return whether a service manager listens for this process, by the rules of sd_listen_fds(3)."""
    return bool(environ.get("LISTEN_FDS")) and environ.get("LISTEN_PID") == str(os.getpid())


def is_ours(host: str, port: int) -> bool:
    """Return whether the listener responds like our gateway."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url(host, port)}/health", timeout=ANSWER_S_MAX) as answer:
            is_gateway = answer.headers.get("openai-processing-ms") is not None
            return is_gateway and json.load(answer) == {"status": "ok"}
    except (OSError, ValueError):
        return False


def free_port_beyond(host: str, port: int) -> int | None:
    """Return the next free port after `port`; None: none among the next `PORTS_TRIED_MAX`."""
    beyond = range(port + 1, min(port + PORTS_TRIED_MAX, 2**16))
    return next((each for each in beyond if not is_taken(host, each)), None)


def is_taken(host: str, port: int) -> bool:
    """Return whether a program listens at the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
