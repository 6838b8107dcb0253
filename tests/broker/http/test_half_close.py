"""Connections that are closed: who still reads gets everything, who left is noticed."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from broker.http import half_close
from tests.broker.http.echo_server import GET, WAIT_S, serving

POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
POLLS_MAX = 7
"""Within 0.5 s, because their intervals are doubled, from 5 ms on."""


@pytest.mark.parametrize(("version", "begin"), [(b"1.0", True), (b"1.1", False), (b"1.1", True)])
async def test_client_that_still_reads_gets_its_whole_response(version: bytes, begin: bool) -> None:
    async with serving(begin=begin) as server:
        server.echo.go.clear()
        client = await server.client()
        client.send(POST.replace(b"1.1", version) + b"abcd")
        client.end()
        await server.is_asked(1)
        await asyncio.sleep(0.1)
        server.echo.go.set()
        status, headers = await client.head()
        assert status == 200
        assert headers.get("connection") == (None if begin and version == b"1.1" else "close")
        found = await (client.rest() if version == b"1.0" else client.chunked())
        assert found == (b"begun abcd" if begin else b"abcd")
        assert await client.rest() == b""
        await server.is_stable(0)
        assert server.echo.left == 0


async def test_pipelined_requests_are_answered_up_to_the_last_complete_one() -> None:
    async with serving() as server:
        server.echo.go.clear()
        client = await server.client()
        client.send(GET * 3 + POST + b"ab")
        client.end()
        await server.is_asked(1)
        server.echo.go.set()
        for _ in range(3):
            assert await client.answer() == b"-"
        assert await client.rest() == b""
        assert server.echo.asked == 3


@pytest.mark.parametrize("sent", [b"", b"GET / HT", POST + b"ab", GET])
async def test_without_a_complete_request_the_connection_is_closed(sent: bytes) -> None:
    async with serving() as server:
        client = await server.client()
        client.send(sent)
        if sent == GET:
            assert await client.answer() == b"-"
        client.end()
        assert await client.rest() == b""
        await server.is_stable(0)


@pytest.mark.parametrize(("behind", "begin"), [(0, True), (3, False), (1000, False)])
@pytest.mark.parametrize("on_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_client_that_has_left_is_noticed(
    on_uvloop: bool, begin: bool, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[float] = []
    poll = half_close.HalfClose._poll

    def counted(self: half_close.HalfClose) -> None:
        polls.append(self._poll_s)
        poll(self)

    monkeypatch.setattr(half_close.HalfClose, "_poll", counted)

    async def talk() -> None:
        async with serving(begin=begin) as server:
            server.echo.stays = True
            client = await server.client()
            client.send(GET * (1 + behind))
            await server.is_asked(1)
            if begin:
                await client.head()
                await client.body(len(b"6\r\nbegun \r\n"))
            client.close()
            await asyncio.gather(*server.state.tasks)
            assert len(polls) <= POLLS_MAX
            assert (server.echo.asked, server.echo.left) == (1, 1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if on_uvloop else None) as runner:
        runner.run(asyncio.wait_for(talk(), WAIT_S))


async def test_client_that_resets_the_connection_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_close, "POLL_S_MAX", 0.05)
    async with serving() as server:
        server.echo.stays = True
        client = await server.client()
        client.send(GET)
        client.end()
        await asyncio.sleep(0.2)
        assert server.echo.left == 0
        client.reset()
        await asyncio.gather(*server.state.tasks)
        assert server.echo.left == 1


# --- HTTP/1.0: no chunks, the connection's end is the body's ------------------------------------------


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
