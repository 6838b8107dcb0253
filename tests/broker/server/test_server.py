"""Shutdown of the HTTP server: what clients have asked for, or are about to, is answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.traffic import HttpCounters
from broker.server import connection
from broker.server.connection import Connection, ConnectionLimits, connection_type
from broker.server.server import Server
from protocol.common.listening import listen
from tests.broker.server.echo_server import Client

GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


class Stopping:
    """A server that is told to stop while its clients are connected."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.kind = cast(type[Connection], connection_type(ConnectionLimits(8, 10.0, 10.0), HttpCounters()))
        config = uvicorn.Config(
            self.app, http=self.kind, interface="asgi3", ws="none", lifespan="off", log_config=None
        )
        self.server = Server(config, cast(Dispatcher, None), 10.0)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"first ", "more_body": True})
            await self.goes_on.wait()
        await send({"type": "http.response.body", "body": b"last"})

    async def stop(self) -> None:
        """Let it stop, and wait until it drains."""
        self.server.should_exit = True
        while not self.kind.is_draining:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def stopping() -> AsyncIterator[tuple[Stopping, Client]]:
    """Yield a server with the connection of a client; both have to end."""
    listener = listen("127.0.0.1", 0)
    made = Stopping()
    serving = asyncio.create_task(made.server.serve([listener]))
    client = Client(*await asyncio.open_connection(*listener.getsockname()))
    yield made, client
    assert await client.rest() == b""
    client.close()
    await serving


async def test_a_request_that_comes_while_the_server_stops_is_answered() -> None:
    async with stopping() as (made, client):
        await made.stop()
        client.send(GET % b"late")
        assert (await client.head())[1]["connection"] == "close"
        assert await client.chunked() == b"last"


async def test_a_stream_is_finished_and_the_request_behind_it_answered() -> None:
    async with stopping() as (made, client):
        client.send(GET % b"stream")
        await client.head()
        await made.stop()
        made.goes_on.set()
        assert await client.chunked() == b"first last"
        client.send(GET % b"late")  # nothing in the head of the stream has advised against it
        assert (await client.head())[1]["connection"] == "close"
        assert await client.chunked() == b"last"


@pytest.mark.parametrize("asks", [False, True])
async def test_a_connection_without_a_request_does_not_delay_the_stop(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LAST_REQUEST_S_MAX", 0.05)
    async with stopping() as (made, client):
        if asks:
            client.send(GET % b"early")
            assert "connection" not in (await client.head())[1]
            assert await client.chunked() == b"last"
        await made.stop()
