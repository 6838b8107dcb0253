"""Responses to clients of HTTP/1.0: no chunks, the connection's end is the body's."""

from __future__ import annotations

import pytest

from tests.broker.http.echo_server import serving


@pytest.mark.parametrize("header", [b"", b"connection: keep-alive\r\n"])
@pytest.mark.parametrize("begin", [False, True])
async def test_response_without_a_length_ends_with_the_connection(header: bytes, begin: bool) -> None:
    async with serving(begin=begin) as server:
        client = await server.client()
        client.send(b"POST / HTTP/1.0\r\n%bcontent-length: 4\r\n\r\nabcd" % header)
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


async def test_response_with_a_length_keeps_it() -> None:
    async with serving() as server:
        server.echo.headers = [(b"Content-Length", b"1")]
        client = await server.client()
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        assert (await client.head())[1]["content-length"] == "1"
        assert await client.rest() == b"-"


async def test_response_to_a_head_request_has_no_body() -> None:
    async with serving() as server:
        client = await server.client()
        client.send(b"HEAD / HTTP/1.0\r\n\r\n")
        assert (await client.head())[0] == 200
        assert await client.rest() == b""
