"""Clients that leave, or close their side of the connection, which is taken for the same."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from tests.broker.server.echo_server import GET, WAIT_S, serving

POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", POST + b"ab", GET])
async def test_connection_is_closed(sent: bytes) -> None:
    async with serving() as server:
        client = await server.client()
        client.send(sent)
        if sent == GET:
            assert await client.answer() == b"-"
        client.end()
        assert await client.rest() == b""
        await server.is_stable(0)


@pytest.mark.parametrize(("behind", "begin"), [(0, True), (3, False), (1000, False)])
@pytest.mark.parametrize("by", ["end", "close", "reset"])
@pytest.mark.parametrize("on_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_application_is_notified_once(on_uvloop: bool, by: str, begin: bool, behind: int) -> None:
    async def talk() -> None:
        async with serving(begin=begin) as server:
            server.echo.stays = True
            client = await server.client()
            client.send(GET * (1 + behind))
            await server.is_asked(1)
            if begin:
                await client.head()
                await client.body(len(b"6\r\nbegun \r\n"))
            getattr(client, by)()
            await asyncio.gather(*server.state.tasks)
            assert (server.echo.asked, server.echo.left) == (1, 1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if on_uvloop else None) as runner:
        runner.run(asyncio.wait_for(talk(), WAIT_S))
