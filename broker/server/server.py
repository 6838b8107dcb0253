"""uvicorn server with limited connections and a graceful shutdown."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from types import FrameType
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.traffic import HttpCounters
from broker.server.connection import Connection, ConnectionLimits, available_connections, connection_type
from protocol.common.listening import BACKLOG, adopted, inherited, listen
from protocol.settings.gateway import GatewaySettings

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn server with a graceful shutdown: no new connections, time for what they have asked for, then a
    last event for each open stream.

    Who holds the listening socket too, the supervisor or the service manager, keeps new connections in its
    backlog until the next gateway accepts them.
    """

    def __init__(self, config: uvicorn.Config, dispatcher: Dispatcher, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._dispatcher = dispatcher
        self._drain_timeout_s = drain_timeout_s
        self.on_started: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        dispatcher = self._dispatcher
        if not dispatcher.stopping:
            log.info("stopping: %d requests in flight", len(dispatcher.flights))
            dispatcher.stop()
            asyncio.get_running_loop().call_later(self._drain_timeout_s, dispatcher.fail_all)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cast(type[Connection], self.config.http_protocol_class).is_draining = True
        await super().shutdown(sockets)


def server_config(app: ASGIApp, configured: GatewaySettings, counters: HttpCounters) -> uvicorn.Config:
    """Return the uvicorn configuration for the application. `counters`: of what never reaches it."""
    limits = ConnectionLimits(
        configured.max_connections, configured.body_timeout_s, configured.read_timeout_s
    )
    if (available := available_connections(limits.connections_max)) < limits.connections_max:
        limits = replace(limits, connections_max=available, max_set_by="that of open files")
        log.warning("the limit of open files allows only %d client connections", available)
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=connection_type(limits, counters),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=configured.idle_timeout_s,
        timeout_graceful_shutdown=int(configured.drain_timeout_s) + 2,
    )


# --- Listening sockets: those passed by the supervisor or a service manager, or the gateway's own ----

FIRST_HANDED_OVER = 3
"""The first file descriptor that a service manager passes, per sd_listen_fds(3)."""


class ListenError(Exception):
    """Raised when there is no socket to listen on; the message says why."""


def open_listeners(host: str, port: int, environ: MutableMapping[str, str], pid: int) -> list[socket.socket]:
    """Return the passed sockets, or else one of our own. Raises `ListenError`."""
    try:
        if (listener := inherited(environ)) is not None:
            return [listener]
        listeners = take_over(environ, pid)
    except (OSError, ValueError) as error:
        raise ListenError(f"cannot use the sockets passed to this process: {error}") from error
    try:
        return listeners or [listen(host, port)]
    except OSError as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def take_over(environ: MutableMapping[str, str], pid: int) -> list[socket.socket]:
    """Return the listening sockets passed by a service manager, by the rules of sd_listen_fds(3).

    They outlive this process: clients that connect while it restarts wait for the next one. Removes the
    variables from `environ`. Raises `ValueError` or `OSError` for a descriptor that is not a listening
    socket.
    """
    variables = {name: environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if variables["LISTEN_PID"] != str(pid):  # unset, or meant for a parent process
        return []
    return [adopted(FIRST_HANDED_OVER + number) for number in range(int(variables["LISTEN_FDS"]))]


def url(listener: socket.socket) -> str:
    """Return the URL of a listener, with its numeric address."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# --- Watchdog of the event loop: a thread that ends the process when the loop hangs ------------------
#
# All clients and workers depend on one loop. If it hangs, in a library or in a file system, nothing else
# notices: connections stay open and the process lives. The service manager or supervisor restarts the
# process.

POLL_S = 5.0
POLLS_MAX = 12
"""Consecutive checks without a beat before the process is ended. Checks are counted, not seconds: a process
that was stopped, or whose machine slept, has not hung."""
EXIT_BROKEN = 70
"""EX_SOFTWARE of sysexits: the process must be restarted."""
_CLOSE_S_MAX = 1.0


def _end_process(why: str) -> None:
    log.critical("%s", why)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(EXIT_BROKEN)


class LoopWatchdog:
    """Watchdog of one event loop, which calls `beat` regularly."""

    def __init__(self, end: Callable[[str], None] = _end_process, look_s: float = POLL_S) -> None:
        """`end`: called once with a reason, on the watchdog's thread."""
        self._end = end
        self._poll_s = look_s
        self._beats = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat(self) -> None:
        """Record that the loop is alive; called on the loop, several times between two checks."""
        self._beats += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join(_CLOSE_S_MAX)

    def _run(self) -> None:
        seen, missed = self._beats, 0
        while not self._over.wait(self._poll_s):
            missed = missed + 1 if self._beats == seen else 0
            seen = self._beats
            if missed >= POLLS_MAX:
                self._end(f"the event loop has not run for {missed * self._poll_s:g} s")
                return
