"""Pipelined requests: all are answered, in order, up to a number."""

from __future__ import annotations

import asyncio

from broker.dispatch.traffic import HttpCounters
from broker.server.connection import PIPELINED_MAX
from tests.broker.server.echo_server import GET, serving

MANY = 40


async def test_pipelined_requests_are_answered_in_order() -> None:
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


async def test_flood_of_pipelined_requests_ends_the_connection_and_is_counted() -> None:
    counters = HttpCounters()
    async with serving(counters=counters) as server:
        server.echo.go.clear()
        client = await server.client()
        client.send(GET * (2 + PIPELINED_MAX))
        assert await client.rest() == b""
        await server.is_stable(0)
        server.echo.go.set()
        await asyncio.gather(*server.state.tasks)
        assert server.echo.asked == 1
    assert (counters.statuses, counters.errors) == ({}, {"invalid_request": 1})
