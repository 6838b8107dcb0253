"""uvicorn server with limited connections and a graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from broker.dispatch.dispatcher import Dispatcher
from broker.http.connection import Connection, ConnectionLimits, available_connections, connection_type
from protocol.gateway_settings import GatewaySettings
from protocol.listening import BACKLOG

log = logging.getLogger(__name__)

FIRST_REQUEST_S_MAX = 1.0
_POLLS = 100


class Server(uvicorn.Server):
    """uvicorn server with a graceful shutdown: no new requests, time for open streams, then a last event for
    each."""

    def __init__(self, config: uvicorn.Config, dispatcher: Dispatcher, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._dispatcher = dispatcher
        self._drain_timeout_s = drain_timeout_s
        self._pass_on: Callable[[int], bool] | None = None
        self.on_started: Callable[[], None] = lambda: None
        self.on_stopping: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    # --- handover to another gateway ---

    def hand_over(self, pass_on: Callable[[int], bool]) -> None:
        """Accept no further connections, and leave those between two requests to another process; exit when
        none is left. `pass_on`: passes a descriptor on, and returns whether that was possible."""
        self._pass_on = pass_on
        for server in self.servers:
            server.close()
        self._pass_idle(pass_on)

    def _pass_idle(self, pass_on: Callable[[int], bool]) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.hand_over(pass_on)

    async def on_tick(self, counter: int) -> bool:
        if self._pass_on is not None:
            self._pass_idle(self._pass_on)
            self.should_exit |= not self.server_state.connections
        return await super().on_tick(counter)

    async def adopt(self, connection: socket.socket) -> None:
        """Serve a client's connection that another process has accepted."""
        loop = asyncio.get_running_loop()

        def create() -> Connection:
            kind: Any = self.config.http_protocol_class
            return cast(Connection, kind(self.config, self.server_state, self.lifespan.state, loop))

        _, protocol = await loop.connect_accepted_socket(create, connection)
        protocol.take_over()

    # --- the end ---

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        dispatcher = self._dispatcher
        if not dispatcher.stopping:
            log.info("stopping: %d requests in flight", len(dispatcher.flights))
            dispatcher.stop()
            asyncio.get_running_loop().call_later(self._drain_timeout_s, dispatcher.fail_all)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait a moment for the first request of new connections, which uvicorn would close at once."""
        self.on_stopping()
        for server in self.servers:
            server.close()
        for _ in range(_POLLS):
            if not any(_is_fresh(connection) for connection in self.server_state.connections):
                break
            await asyncio.sleep(FIRST_REQUEST_S_MAX / _POLLS)
        await super().shutdown(sockets)


def _is_fresh(connection: object) -> bool:
    return isinstance(connection, HttpToolsProtocol) and connection.cycle is None


def server_config(app: ASGIApp, configured: GatewaySettings) -> uvicorn.Config:
    """Return the uvicorn configuration for the application."""
    connections_max = available_connections(configured.max_connections)
    if connections_max < configured.max_connections:
        log.warning("the limit of open files allows only %d client connections", connections_max)
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=connection_type(
            ConnectionLimits(connections_max, configured.body_timeout_s, configured.read_timeout_s)
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
