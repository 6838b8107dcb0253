"""uvicorn, as the gateway runs it: bounded connections, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from broker.config import GatewaySettings
from broker.dispatch.dispatcher import Dispatcher
from broker.http.connection import Limits, available_connections, connection_type
from broker.http.listeners import BACKLOG

log = logging.getLogger(__name__)

FIRST_REQUEST_S_MAX = 1.0
_LOOKS = 100


class Server(uvicorn.Server):
    """uvicorn with an orderly end: no new requests, time for open streams, then a last event for each."""

    def __init__(self, config: uvicorn.Config, dispatcher: Dispatcher, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._dispatcher = dispatcher
        self._drain_timeout_s = drain_timeout_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        dispatcher = self._dispatcher
        if not dispatcher.stopping:
            log.info("stopping: %d requests in flight", len(dispatcher.flights))
            dispatcher.stop()
            asyncio.get_running_loop().call_later(self._drain_timeout_s, dispatcher.abandon)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn hangs up on whoever has not asked yet: those who have just connected may, for a moment."""
        for server in self.servers:
            server.close()
        for _ in range(_LOOKS):
            if not any(_is_fresh(connection) for connection in self.server_state.connections):
                break
            await asyncio.sleep(FIRST_REQUEST_S_MAX / _LOOKS)
        await super().shutdown(sockets)


def _is_fresh(connection: object) -> bool:
    return isinstance(connection, HttpToolsProtocol) and connection.cycle is None


def server_config(app: ASGIApp, configured: GatewaySettings) -> uvicorn.Config:
    """How uvicorn serves the application."""
    connections_max = available_connections(configured.max_connections)
    if connections_max < configured.max_connections:
        log.warning("%d connections at the most: the system gives no more descriptors", connections_max)
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=connection_type(Limits(connections_max, configured.body_timeout_s, configured.read_timeout_s)),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=configured.idle_timeout_s,
        timeout_graceful_shutdown=int(configured.drain_timeout_s) + 2,
    )
