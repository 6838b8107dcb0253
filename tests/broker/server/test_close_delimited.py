"""Responses to clients of HTTP/1.0: no chunks, the connection's end is the body's."""

from __future__ import annotations

import pytest

from tests.broker.server.echo_server import serving


@pytest.mark.parametrize("begin", [False, True])
async def test_response_without_a_length_ends_with_the_connection(begin: bool) -> None:
    async with serving(begin=begin) as server:
        client = await server.client()
        client.send(b"POST / HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 4\r\n\r\nabcd")
        status, headers = await client.head()
        assert status == 200
        assert headers["connection"] == "close"
        assert "transfer-encoding" not in headers
        assert await client.rest() == (b"begun abcd" if begin else b"abcd")
        await server.is_stable(0)


async def test_response_that_fails_under_way_ends_with_the_connection() -> None:
    async with serving(begin=True) as server:
        server.echo.fails = True
        client = await server.client()
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        await client.head()
        assert await client.rest() == b"begun -"


@pytest.mark.parametrize(("method", "body"), [(b"GET", b"-"), (b"HEAD", b"")])
async def test_response_with_a_length_keeps_it(method: bytes, body: bytes) -> None:
    async with serving() as server:
        server.echo.headers = [(b"Content-Length", b"1")]
        client = await server.client()
        client.send(method + b" / HTTP/1.0\r\n\r\n")
        assert (await client.head())[1]["content-length"] == "1"
        assert await client.rest() == body
