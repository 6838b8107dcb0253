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
from broker.http import connection
from broker.http.connection import Connection, ConnectionLimits, connection_type
from broker.http.server import Server
from protocol.listening import listen

WAIT_S = 30.0
GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


class Stopping:
    """A server that is told to stop while its clients are connected."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.kind = cast(type[Connection], connection_type(ConnectionLimits(8, 10.0, 10.0)))
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
        for _ in range(1000):
            if self.kind.is_draining:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the server does not drain")


@contextlib.asynccontextmanager
async def stopping() -> AsyncIterator[tuple[Stopping, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a server with the connection of a client; both have to end."""
    listener = listen("127.0.0.1", 0)
    made = Stopping()
    serving = asyncio.create_task(made.server.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    yield made, reader, writer
    assert await reader.read() == b""
    writer.close()
    await serving


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return the head and the chunked body of a response."""
    head = await reader.readuntil(b"\r\n\r\n")
    return head, await reader.readuntil(b"0\r\n\r\n")


def test_a_request_that_comes_while_the_server_stops_is_answered() -> None:
    async def scenario() -> None:
        async with stopping() as (made, reader, writer):
            await made.stop()
            writer.write(GET % b"late")
            head, body = await answer(reader)
            assert b"connection: close" in head
            assert b"last" in body

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_a_stream_is_finished_and_the_request_behind_it_answered() -> None:
    async def scenario() -> None:
        async with stopping() as (made, reader, writer):
            writer.write(GET % b"stream")
            await reader.readuntil(b"first ")
            await made.stop()
            made.goes_on.set()
            assert b"last" in await reader.readuntil(b"0\r\n\r\n")
            writer.write(GET % b"late")  # nothing in the head of the stream has advised against it
            assert b"connection: close" in (await answer(reader))[0]

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


@pytest.mark.parametrize("asks", [False, True])
def test_a_connection_without_a_request_does_not_delay_the_stop(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LAST_REQUEST_S_MAX", 0.05)

    async def scenario() -> None:
        async with stopping() as (made, reader, writer):
            if asks:
                writer.write(GET % b"early")
                assert b"connection: close" not in (await answer(reader))[0]
            await made.stop()

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))
