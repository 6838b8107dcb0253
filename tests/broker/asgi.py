"""ASGI application without a server: one task per exchange, whose messages a test can read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Message

WAIT_S = 60.0


def run(talk: Coroutine[Any, Any, None]) -> None:
    """Run a conversation to its end, or fail."""
    asyncio.run(asyncio.wait_for(talk, WAIT_S))


async def until(check: Callable[[], object]) -> None:
    """Let the loop run until `check` holds; `run` bounds how long."""
    while not check():  # noqa: ASYNC110 - the condition has no event of its own
        await asyncio.sleep(0)


class Exchange:
    """Exchange of one request and its response with the application."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = b"",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Start the exchange. `body` may be several chunks; None is a body that never ends. `headers` without
        Host get one that every server accepts."""
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self.sent: list[Message] = []
        chunks = [body] if isinstance(body, bytes) else list(body or ())
        for number, chunk in enumerate(chunks, 1):
            message = {"type": "http.request", "body": chunk, "more_body": number < len(chunks)}
            self._incoming.put_nowait(message)
        given = list(headers)
        if not any(name == b"host" for name, _ in given):
            given.insert(0, (b"host", b"127.0.0.1:8000"))
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
            "query_string": query.encode(), "headers": given,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        await self._may_write.wait()
        self.sent.append(message)

    # --- actions of the client ---

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    def stop_reading(self) -> None:
        self._may_write.clear()

    def read_on(self) -> None:
        self._may_write.set()

    async def end(self) -> Exchange:
        """Wait until the application has finished the exchange."""
        await self.task
        return self

    async def refusal(self) -> tuple[int, str, str | None]:
        """Wait for the end, and return status, code and parameter of the error."""
        error = (await self.end()).error
        return self.status, error["code"], error["param"]

    async def started(self) -> None:
        await until(lambda: self.sent or self.task.done())

    async def holds(self, piece: bytes) -> None:
        """Wait until the client has received `piece`."""
        await until(lambda: piece in self.body or self.task.done())
        assert piece in self.body

    @property
    def unread(self) -> int:
        """Number of body chunks that the application has not received."""
        return self._incoming.qsize()

    # --- the response ---

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        pairs = [(name.decode(), value.decode()) for name, value in self.sent[0]["headers"]]
        assert len({name for name, _ in pairs}) == len(pairs), f"duplicate header: {pairs}"
        return dict(pairs)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def complete(self) -> bool:
        """Whether the response started once and ended once, with nothing after its end."""
        kinds = [message["type"] for message in self.sent]
        more = [message.get("more_body", False) for message in self.sent[1:]]
        return kinds == ["http.response.start"] + ["http.response.body"] * (len(kinds) - 1) and more == (
            [True] * (len(more) - 1) + [False]
        )

    @property
    def json(self) -> Any:
        assert self.complete
        if "content-length" in self.headers:
            assert int(self.headers["content-length"]) == len(self.body)
        return json.loads(self.body)

    @property
    def documents(self) -> list[dict[str, Any]]:
        """Documents of the events of a stream, up to here."""
        lines = self.body.split(b"\n")
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]

    @property
    def numbered(self) -> list[tuple[int, str]]:
        """Number and type of each event of a streamed response."""
        return [(document["sequence_number"], document["type"]) for document in self.documents]

    @property
    def error(self) -> dict[str, Any]:
        """Error object of a refusal, after its fields are checked."""
        assert self.headers["content-type"] == "application/json"
        [(name, error)] = self.json.items()
        assert name == "error"
        assert {"message", "type", "param", "code"} <= error.keys()
        assert isinstance(error["message"], str)
        assert error["message"]
        return dict(error)


@asynccontextmanager
async def lifespan(app: ASGIApp) -> AsyncIterator[None]:
    """Run the application's lifespan: startup before the body, shutdown after it."""
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    sent: asyncio.Queue[Message] = asyncio.Queue()
    task = asyncio.ensure_future(app({"type": "lifespan", "asgi": {}, "state": {}}, incoming.get, sent.put))
    incoming.put_nowait({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    yield
    incoming.put_nowait({"type": "lifespan.shutdown"})
    assert (await sent.get())["type"] == "lifespan.shutdown.complete"
    await task
