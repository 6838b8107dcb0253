"""uvicorn server with limited connections and a graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.traffic import HttpCounters
from broker.server.connection import Connection, ConnectionLimits, available_connections, connection_type
from protocol.common.listening import BACKLOG
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
    connections_max = available_connections(configured.max_connections)
    if connections_max < configured.max_connections:
        log.warning("the limit of open files allows only %d client connections", connections_max)
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=connection_type(
            ConnectionLimits(connections_max, configured.body_timeout_s, configured.read_timeout_s), counters
        ),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=configured.idle_timeout_s,
        timeout_graceful_shutdown=int(configured.drain_timeout_s) + 2,
    )
