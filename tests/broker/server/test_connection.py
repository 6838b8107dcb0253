"""Limits on a client before its request is complete, over real sockets with an echo application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
from typing import cast

import pytest
from starlette.types import ASGIApp

from broker.dispatch.traffic import HttpCounters
from broker.server import connection, server
from broker.server.connection import HEAD_BYTES_MAX, HEADERS_MAX, available_connections
from broker.server.server import server_config
from protocol.settings.gateway import GatewaySettings
from tests.broker.server.echo_server import GET, SOON_S, Client, Server, serving

PIECE_BYTES_MAX = 2**18
"""Most bytes that asyncio reads at once."""


async def test_the_deadline_is_not_for_answers_nor_for_requests_that_wait_behind_them() -> None:
    async with serving(body_s_max=4 * SOON_S) as server:
        server.echo.go.clear()
        client = await server.client()
        client.send(GET + b"\r\n")  # some clients send an extra empty line
        await asyncio.sleep(5 * SOON_S)
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
        await asyncio.sleep(5 * SOON_S)
        client.send(b"cd")
        server.echo.go.set()
        for body in (b"-", b"abcd"):
            assert await client.answer() == body


@pytest.mark.parametrize(
    "begun",
    [
        b"G",
        b"GET / HTTP/1.1\r\nhost: x\r\nx-endless: aaaa",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
)
async def test_a_request_that_does_not_arrive_in_time_is_given_up(begun: bytes) -> None:
    # Long enough for a busy machine: a connection without any request is closed without an answer.
    async with serving(body_s_max=10 * SOON_S) as server:
        client = await server.client()
        client.send(begun)
        assert await client.refusal() == (408, "request_timeout")
        client.close()
        await server.is_stable(0)
        assert server.echo.left == server.echo.asked == (b"\r\n\r\n" in begun)


async def test_a_head_has_less_time_than_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for a busy machine: a connection without any request is closed without an answer.
    monkeypatch.setattr(connection, "HEAD_S_MAX", 10 * SOON_S)
    async with serving() as server:
        slow, large = await server.client(), await server.client()
        slow.send(b"GET / HTTP/1.1\r\n")
        large.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
        assert await slow.refusal() == (408, "request_timeout")
        large.send(b"cd")
        assert await large.answer() == b"abcd"


async def test_slow_byte_by_byte_request_times_out() -> None:
    async with serving(body_s_max=10 * SOON_S) as server:
        client = await server.client()

        async def dribble() -> None:
            for letter in b"GET / HTTP/1.1\r\nx-slow: " + b"a" * 1000:
                client.send(bytes([letter]))
                await asyncio.sleep(SOON_S / 4)

        dribbling = asyncio.ensure_future(dribble())
        assert (await client.head())[0] == 408
        dribbling.cancel()


@pytest.mark.parametrize("said", [b"", b"\r\n\r\n\r\n"])
async def test_idle_connection_without_a_request_is_closed(said: bytes) -> None:
    async with serving(body_s_max=SOON_S) as server:
        client = await server.client()
        client.send(said)
        # Bytes sent to a closed connection are answered with a reset.
        with contextlib.suppress(ConnectionResetError):
            assert await client.rest() == b""


async def test_a_late_rest_of_a_body_that_was_answered_already_ends_the_connection_only() -> None:
    async with serving(body_s_max=4 * SOON_S, begin=True) as server:
        client = await server.client()
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc")
        assert (await client.head())[0] == 200
        assert await client.rest() == b"6\r\nbegun \r\n"


# --- clients that do not read -----------------------------------------------------------------------

LARGE = 2**20


async def ask_for_much(server: Server, header: bytes = b"") -> Client:
    """Connect a client that does not read an answer larger than the sockets' buffers."""
    loop, own = asyncio.get_running_loop(), socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.setblocking(False)
    await loop.sock_connect(own, ("127.0.0.1", server.port))
    client = Client(*await asyncio.open_connection(sock=own, limit=2**10))
    server.clients.append(client)
    client.send(b"POST / HTTP/1.1\r\nhost: here\r\n%bcontent-length: %d\r\n\r\n" % (header, LARGE))
    client.send(b"x" * LARGE)
    return client


async def test_client_that_does_not_read_its_response_is_disconnected_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(unread_s_max=0.2) as server:
        await ask_for_much(server)
        await server.is_asked(1)
        await server.is_stable(0)
    [record] = [record for record in caplog.records if record.name == connection.__name__]
    assert record.getMessage() == "127.0.0.1 disconnected: it has read nothing for 0.2 s (--read-timeout)"


connection_made = connection.Connection.connection_made


def never_paused(self: connection.Connection, transport: asyncio.Transport) -> None:
    """Replace `connection_made`, so that the transport never pauses writing."""
    connection_made(self, transport)
    transport.set_write_buffer_limits(high=2 * LARGE)


@pytest.mark.parametrize("end", ["close", "failure", "departure"])
async def test_a_connection_that_ends_does_not_wait_for_who_does_not_read_the_rest(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection.Connection, "connection_made", never_paused)
    async with serving(unread_s_max=0.2) as server:
        server.echo.fails = end == "failure"
        client = await ask_for_much(server, b"connection: close\r\n" if end == "close" else b"")
        await server.is_asked(1)
        if end == "departure":
            await asyncio.gather(*server.state.tasks)
            client.end()
        await server.is_stable(0)


# --- heads -------------------------------------------------------------------------------------------


def headers(count: int) -> bytes:
    return b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % number for number in range(count)) + b"\r\n"


async def test_header_count_is_limited() -> None:
    async with serving() as server:
        client = await server.client()
        client.send(headers(HEADERS_MAX))
        assert await client.answer() == b"-"
        client.send(headers(HEADERS_MAX + 1))
        assert await client.refusal() == (431, "headers_too_large")
        assert server.echo.asked == 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n", b"GET / HTTP/1.1\r\n%s: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nx-endless: %s",
    ],
)  # fmt: skip
@pytest.mark.parametrize("pieces", [1, 50])
async def test_a_head_beyond_the_limit_is_refused_however_it_comes(head: bytes, pieces: int) -> None:
    async with serving() as server:
        client = await server.client()
        # Bytes received together with the start are not counted before a header is complete.
        data = head % (b"a" * (HEAD_BYTES_MAX + PIECE_BYTES_MAX))
        size = -(-len(data) // pieces)
        for start in range(0, len(data), size):
            client.send(data[start : start + size])
            await asyncio.sleep(0)
        status, _ = await client.head()
        assert status == 431
        assert server.echo.asked == 0


async def test_a_head_just_within_the_limit_behind_a_large_body_is_taken() -> None:
    async with serving() as server:
        client = await server.client()
        body = b"b" * 200_000
        large = b"x-large: " + b"a" * (HEAD_BYTES_MAX - 100) + b"\r\n"
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        client.send(b"GET / HTTP/1.1\r\n" + large + b"\r\n")
        for expected in (body, b"-"):
            assert await client.answer() == expected


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n"]
)
async def test_what_is_no_request_gets_a_400(said: bytes) -> None:
    async with serving() as server:
        client = await server.client()
        client.send(said)
        assert await client.refusal() == (400, "invalid_request")


async def test_refused_request_gets_no_100_continue(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        client = await server.client()
        head = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n"
        client.send(head + b"nonsense\r\n")
        assert await client.refusal() == (400, "invalid_request")
        await asyncio.gather(*server.state.tasks)
    assert "Exception" not in caplog.text


async def test_nonsense_behind_a_request_does_not_land_in_its_answer() -> None:
    async with serving(begin=True) as server:
        server.echo.go.clear()
        client = await server.client()
        client.send(GET)
        assert (await client.head())[0] == 200
        assert await client.body(len(b"6\r\nbegun \r\n")) == b"6\r\nbegun \r\n"
        client.send(b"!!! nonsense\r\n\r\n")
        assert await client.rest() == b""


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAA\r\n"


@pytest.mark.parametrize("piece_bytes", [1, 10_000])
@pytest.mark.parametrize(
    ("framing", "body"),
    [(b"content-length: 5", b"hello"), (b"transfer-encoding: chunked", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n")],
    ids=["counted", "chunked"],
)
async def test_an_offer_of_another_protocol_is_ignored_and_the_body_is_not(
    framing: bytes, body: bytes, piece_bytes: int
) -> None:
    async with serving() as server:
        client = await server.client()
        said = b"POST /a HTTP/1.1\r\nhost: x\r\n" + OFFER + framing + b"\r\n\r\n" + body
        said += b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nbye"
        for start in range(0, len(said), piece_bytes):
            client.send(said[start : start + piece_bytes])
            await asyncio.sleep(0)
        for path, expected in (("/a", b"hello"), ("/b", b"bye")):
            status, headers = await client.head()
            assert (status, headers["x-path"]) == (200, path)
            assert await client.chunked() == expected


# --- number of connections ---------------------------------------------------------------------------


async def test_a_connection_beyond_the_limit_is_told_so_and_the_next_ones_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "TURNED_AWAY_MAX", 1)
    async with serving(connections_max=2) as server:
        server.echo.go.clear()
        first, second = await server.client(), await server.client()
        for client in (first, second):
            client.send(GET)
        await server.is_asked(2)
        third = await server.client()
        await server.is_stable(3)
        fourth = await server.client()
        assert await fourth.rest() == b""
        third.send(GET)
        status, told = await third.head()
        assert (status, told["retry-after"], told["connection"]) == (503, "1", "close")
        assert json.loads(await third.rest())["error"]["code"] == "too_many_connections"
        second.close()
        await server.is_stable(1)
        server.echo.go.set()
        newcomer = await server.client()
        newcomer.send(GET)
        for client in (first, newcomer):
            assert (await client.head())[0] == 200


async def test_connections_turned_away_are_counted_and_logged_at_most_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "TURNED_AWAY_MAX", 1)
    counters = HttpCounters()
    async with serving(connections_max=1, counters=counters) as server:
        await server.client()
        await server.is_stable(1)
        answered = await server.client()
        await server.is_stable(2)
        for _ in range(3):
            assert await (await server.client()).rest() == b""
        answered.send(GET)
        assert (await answered.head())[0] == 503
        assert counters.connections_turned_away == 4
        assert (counters.statuses[503], counters.errors["too_many_connections"]) == (1, 1)
        await answered.rest()
        monkeypatch.setattr(connection, "TURNED_AWAY_LOG_S", 0.0)
        await server.is_stable(1)
        third = await server.client()
        await server.is_stable(2)
        third.close()
    first, second = [record.getMessage() for record in caplog.records]
    assert first == "client connections turned away: 1; 1 are open, the limit (--max-connections)"
    assert second.startswith("client connections turned away: 4; ")


@pytest.mark.parametrize(("allowed", "limit"), [(8, "--max-connections"), (3, "that of open files")])
def test_the_log_names_the_limit_that_turns_away(
    allowed: int, limit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "available_connections", lambda wanted: allowed)
    config = server_config(cast(ASGIApp, None), GatewaySettings(max_connections=8), HttpCounters())
    made = cast(type[connection.Connection], config.http)
    made.turned_away_log.note(HttpCounters(), made.limits, now=0.0)
    assert caplog.messages[-1].endswith(f"{allowed} are open, the limit ({limit})")


async def test_refusals_of_the_connection_itself_are_counted_as_responses() -> None:
    counters = HttpCounters()
    async with serving(counters=counters) as server:
        client = await server.client()
        client.send(b"!!! nonsense\r\n\r\n")
        assert await client.refusal() == (400, "invalid_request")
    assert (counters.statuses, counters.errors) == ({400: 1}, {"invalid_request": 1})


async def test_connection_over_the_limit_is_closed_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TURN_AWAY_S_MAX", SOON_S)
    async with serving(connections_max=1) as server:
        server.echo.go.clear()
        (await server.client()).send(GET)
        await server.is_asked(1)
        assert await (await server.client()).rest() == b""
        await server.is_stable(1)


async def test_client_that_resumes_reading_in_time_stays_connected() -> None:
    async with serving() as server:
        reading = await ask_for_much(server)
        await server.is_asked(1)
        [served] = server.state.connections
        assert isinstance(served, connection.Connection)
        while served._unread is None:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        await reading.head()
        assert len(await reading.chunked()) == LARGE
        assert served._unread is None


@pytest.mark.parametrize(
    ("limits", "available", "raised"),
    [
        ((2000, 4000), 1000, None),
        ((256, 256), 64, 256),
        ((100, 150), 1, 150),
        ((256, resource.RLIM_INFINITY), 1000, 1192),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1000, None),
    ],
)
def test_there_are_no_more_connections_than_descriptors(
    limits: tuple[int, int], available: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, to: asked.append(to))
    assert available_connections(1000) == available
    assert asked == ([] if raised is None else [(raised, limits[1])])
