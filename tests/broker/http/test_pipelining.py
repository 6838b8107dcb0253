"""Pipelined requests: all are answered, in order, and no more are parsed than the limit allows."""

from __future__ import annotations

import asyncio

from broker.http.connection import PIECE_BYTES, PIPELINED_MAX, UNPARSED_BYTES_MAX, Connection
from tests.broker.http.echo_server import GET, serving

MANY = 40
READ_BYTES_MAX = 2**18
"""Most bytes that asyncio reads at once."""


async def test_pipelined_requests_are_answered_however_many() -> None:
    async with serving() as server:
        server.echo.go.clear()
        client = await server.client()
        for number in range(MANY):
            client.send(b"GET /%d HTTP/1.1\r\nhost: x\r\nx-filler: %b\r\n\r\n" % (number, b"a" * 6000))
        await server.is_asked(1)
        await asyncio.sleep(0.1)
        server.echo.go.set()
        for number in range(MANY):
            status, headers = await client.head()
            assert (status, headers["x-path"]) == (200, f"/{number}")
            assert await client.chunked() == b"-"
        assert server.echo.asked == MANY


async def test_flood_of_pipelined_requests_is_not_read() -> None:
    async with serving() as server:
        server.echo.go.clear()
        client = await server.client()
        client.send(GET * (2**24 // len(GET)))
        await server.is_asked(1)
        [served] = server.state.connections
        assert isinstance(served, Connection)
        while len(served._unparsed) <= UNPARSED_BYTES_MAX:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert PIPELINED_MAX <= len(served.pipeline) <= PIPELINED_MAX + PIECE_BYTES // len(GET) + 1
        assert len(served._unparsed) <= UNPARSED_BYTES_MAX + READ_BYTES_MAX
        server.echo.go.set()
        for _ in range(200):
            assert await client.answer() == b"-"
            assert len(served._unparsed) <= UNPARSED_BYTES_MAX + READ_BYTES_MAX
        assert server.echo.asked < 700
        client.reset()
