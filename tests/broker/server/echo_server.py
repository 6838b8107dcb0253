"""Echo application behind the gateway's connections, and its clients, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from broker.dispatch.traffic import HttpCounters
from broker.server import connection
from broker.server.connection import ConnectionLimits

WAIT_S = 60.0
SOON_S = 0.05
NEVER_S = 3600.0
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Echo:
    """Application that echoes the body once `go` is set. With `begin`, it starts its response before."""

    def __init__(self, *, begin: bool = False) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.asked = 0
        self.left = 0
        self.stays = False
        """Whether to wait for the client's disconnect without an answer."""
        self.fails = False
        """Whether to fail in the middle of the response."""
        self.headers: list[tuple[bytes, bytes]] = []
        self._begin = begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        headers = [(b"x-path", scope["raw_path"]), *self.headers]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        if self._begin:
            await send(start)
            await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        body, more = b"", True
        while more:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            more = message["more_body"]
        if self.stays:
            assert (await receive())["type"] == "http.disconnect"
            self.left += 1
            return
        await self.go.wait()
        if not self._begin:
            await send(start)
        await send({"type": "http.response.body", "body": body or b"-", "more_body": self.fails})
        if self.fails:
            raise RuntimeError("scripted")


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def body(self, count: int) -> bytes:
        return await self._reader.readexactly(count)

    async def chunked(self) -> bytes:
        """Read a chunked body."""
        found = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            found += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return found

    async def answer(self) -> bytes:
        """Read an answer whose body is chunked, and return the body."""
        assert (await self.head())[0] == 200
        return await self.chunked()

    async def rest(self) -> bytes:
        """Read until the connection is closed."""
        return await self._reader.read()

    async def refusal(self) -> tuple[int, str]:
        """Return status and code of an error response after which the connection is closed."""
        status, headers = await self.head()
        body = await self.rest()
        assert headers["content-type"] == "application/json"
        assert headers["connection"] == "close"
        assert headers["x-request-id"].startswith("req_")
        assert int(headers["content-length"]) == len(body)
        return status, json.loads(body)["error"]["code"]

    def end(self) -> None:
        """Close the sending side only."""
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Close without sending what is left, and with a reset."""
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort()


class Server:
    def __init__(self, port: int, echo: Echo, state: ServerState) -> None:
        self.port = port
        self.echo = echo
        self.state = state
        self.clients: list[Client] = []

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=2**20))
        self.clients.append(client)
        return client

    async def is_asked(self, requests: int) -> None:
        while self.echo.asked < requests:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)

    async def is_stable(self, connections: int) -> None:
        while len(self.state.connections) != connections:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    *,
    connections_max: int = 100,
    body_s_max: float = NEVER_S,
    unread_s_max: float = NEVER_S,
    begin: bool = False,
    counters: HttpCounters | None = None,
) -> AsyncIterator[Server]:
    echo = Echo(begin=begin)
    limits = ConnectionLimits(connections_max, body_s_max, unread_s_max)
    made = connection.connection_type(limits, counters or HttpCounters())
    config = uvicorn.Config(
        echo, http=made, ws="none", lifespan="off", log_config=None, timeout_keep_alive=3600
    )
    config.load()
    state = ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: made(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    # Connections inherit it: a client that does not read soon fills the buffers.
    listener.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    server = Server(listener.sockets[0].getsockname()[1], echo, state)
    try:
        yield server
    finally:
        echo.go.set()
        for client in server.clients:
            client.close()
        listener.close()
        await server.is_stable(0)
        await asyncio.gather(*state.tasks)
