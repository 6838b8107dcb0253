"""A minimal HTTP client with low overhead: persistent connections, unparsed response bodies."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import uvloop

CHAT = "/v1/chat/completions"

T = TypeVar("T")


def post(path: str, document: object, *headers: str) -> bytes:
    """Return the bytes of a request."""
    body = json.dumps(document).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response. `took_s`: time since the first byte of the request."""

    status: int
    headers: dict[str, str]
    body: bytes
    took_s: float

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class Connection(asyncio.Protocol):
    """A connection for one request at a time. `received`: bytes of the current response so far."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.lost = asyncio.Event()
        self._asked_at = 0.0
        self._head: tuple[int, dict[str, str]] | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._sought: tuple[int | bytes, asyncio.Event] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def ask(self, request: bytes) -> asyncio.Future[Reply]:
        """Send a request. Raises `ConnectionError` if the connection ends before the response does."""
        self.received.clear()
        self._head = None
        self._asked_at = time.perf_counter()
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._reply

    def write(self, data: bytes) -> None:
        """Write a part of a request without waiting for a response."""
        self._transport.write(data)

    async def has_received(self, sought: int | bytes) -> None:
        """Wait for `sought` bytes of the response, for these bytes in it, or for its end."""
        arrived = asyncio.Event()
        self._sought = sought, arrived
        self._notice()
        await arrived.wait()

    def _notice(self) -> None:
        if self._sought is not None:
            sought, arrived = self._sought
            found = len(self.received) >= sought if isinstance(sought, int) else sought in self.received
            if found or self.lost.is_set() or (self._reply is not None and self._reply.done()):
                arrived.set()

    def stop_reading(self) -> None:
        self._transport.pause_reading()

    def abort(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._receive(data)
        self._notice()

    def _receive(self, data: bytes) -> None:
        self.received += data
        if self._head is None:
            self._read_head()
        if self._head is None or self._reply is None or self._reply.done():
            return
        status, headers = self._head
        length = headers.get("content-length")
        if length is None:
            if self.received.endswith(b"0\r\n\r\n"):
                self._finish(status, headers, _dechunked(self.received))
        elif len(self.received) >= int(length):
            self._finish(status, headers, bytes(self.received))

    def _read_head(self) -> None:
        head, found, rest = bytes(self.received).partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode().split("\r\n")
        parts = (line.partition(": ") for line in lines)
        self._head = int(first.split(" ")[1]), {name: value for name, _, value in parts}
        self.received[:] = rest

    def _finish(self, status: int, headers: dict[str, str], body: bytes) -> None:
        assert self._reply is not None
        self._reply.set_result(Reply(status, headers, body, time.perf_counter() - self._asked_at))

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ConnectionError("closed in the middle of an answer"))
        self._notice()


def _dechunked(data: bytes | bytearray) -> bytes:
    pieces: list[bytes | bytearray] = []
    at = 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if not size:
            return b"".join(pieces)
        pieces.append(bytes(data[end + 2 : end + 2 + size]))
        at = end + 2 + size + 2


class Pool:
    """A pool of connections to one server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []
        self._open: list[Connection] = []

    async def open(self, own: socket.socket | None = None) -> Connection:
        """Open a connection outside the pool. `own`: a connected socket to use."""
        create = asyncio.get_running_loop().create_connection
        if own is None:
            _, connection = await create(Connection, "127.0.0.1", self._port)
        else:
            _, connection = await create(Connection, sock=own)
        self._open = [known for known in self._open if not known.lost.is_set()]
        self._open.append(connection)
        return connection

    async def ask(self, request: bytes) -> Reply:
        """Send a request on a pooled connection. Raises `ConnectionError`."""
        while self._idle and self._idle[-1].lost.is_set():
            self._idle.pop()
        if self._idle:
            connection = self._idle.pop()
            try:
                return await self._ask(connection, request)
            except ConnectionError:
                if connection.received:
                    raise
                # The server has just closed the idle connection.
        return await self._ask(await self.open(), request)

    async def _ask(self, connection: Connection, request: bytes) -> Reply:
        reply = await connection.ask(request)
        self._idle.append(connection)
        return reply

    async def close(self) -> None:
        for connection in self._open:
            connection.abort()
            await connection.lost.wait()
        self._open.clear()
        self._idle.clear()


def on_uvloop(talk: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop, which has the lowest overhead."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(talk)
