"""Shutdown of the HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from broker.dispatch.dispatcher import Dispatcher
from broker.http import server as server_module
from broker.http.server import Server

WAIT_S = 10.0


def test_connection_without_a_request_does_not_delay_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FIRST_REQUEST_S_MAX", 0.05)
    shut_down: list[object] = []

    async def shutdown(self: uvicorn.Server, sockets: object = None) -> None:
        shut_down.append(sockets)

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)

    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("no request was sent")

    server = Server(uvicorn.Config(app), cast(Dispatcher, None), 1.0)
    server.servers = []
    fresh: Any = object.__new__(HttpToolsProtocol)
    fresh.cycle = None
    server.server_state.connections.add(fresh)
    asyncio.run(asyncio.wait_for(server.shutdown(), WAIT_S))
    assert shut_down == [None]
