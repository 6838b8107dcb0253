"""ASGI responses over flights: a stream of events, or one document. Also bodies with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from broker.dispatch.flight import Batch, Flight
from broker.http import cache_header
from broker.http.errors import error_response
from broker.http.reader import Reader
from broker.http.straight import Straight, find
from protocol.errors import Code, RequestError
from protocol.messages import Accepted, Reused

HEADERS_HELD_S_MAX = 1.0
"""How long a response, once its request was accepted, waits for what its headers say of the cache."""


class Renderer(Protocol):
    """A dialect's second half: what a request's flights bring -> bytes of the body.

    `feed` returns what can be sent now, empty when nothing can, and raises `RequestError` when a flight
    failed before anything was. Once it is `over` it has returned everything.
    """

    content_type: bytes
    over: bool

    def wait(self) -> bytes:
        """What is sent when nothing else was for a while; empty where the format has no such thing."""

    def feed(self, batches: Sequence[Batch]) -> bytes: ...


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The whole body. Raises `RequestError(request_too_large)`, at once where the size is declared."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > bytes_max:
            raise _too_large(bytes_max)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(bytes_max: int) -> RequestError:
    return RequestError(Code.REQUEST_TOO_LARGE, f"The request body is larger than {bytes_max} bytes.")


class FlightResponse:
    """Answers one request from its flights, one for each choice.

    Their context is open for exactly as long as the client is served: however the response ends, by its
    last event, by one flight's failure, by the client leaving or by cancellation, the slots are free and the
    worker knows.
    """

    def __init__(
        self,
        aboard: AbstractContextManager[Sequence[Flight]],
        renderer: Renderer,
        *,
        prompts: int,
        keepalive_s: float,
        on_end: Callable[[Flight, int], None],
    ) -> None:
        """`prompts`: how many the flights answer, equally many each, side by side."""
        self._aboard = aboard
        self._prompts = prompts
        self._renderer = renderer
        self._keepalive_s = keepalive_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # what the log says of a client that left before it had an answer
        try:
            with self._aboard as flights:
                reader = Reader(flights)
                watcher = asyncio.ensure_future(_watch(receive, reader))
                try:
                    status = await self._answer(flights, reader, send, find(scope))
                except RequestError as error:
                    status = error.kind.status
                    raise
                finally:
                    watcher.cancel()
                    for flight in flights:
                        self._on_end(flight, status)
        except RequestError as error:
            await error_response(error, scope)(scope, receive, send)

    async def _answer(
        self, flights: Sequence[Flight], reader: Reader, send: Send, straight: Straight | None
    ) -> int:
        started = False
        batches = await self._opening(flights, reader)
        while not reader.client_gone:
            body = self._render(batches)
            over = self._renderer.over
            if body or over:
                if not started:
                    started = True
                    cache = cache_header.header(flights, self._prompts)
                    await send(_start(self._renderer.content_type, len(body) if over else None, cache))
                await send({"type": "http.response.body", "body": body, "more_body": not over})
            if over:
                return 200
            if started and straight is not None:
                reader.aside = partial(self._pass_on, straight)
            batches = await reader.batches(self._keepalive_s if started else None)
        return 499

    def _render(self, batches: Sequence[Batch]) -> bytes:
        if self._renderer.over:
            return b""  # its last bytes have gone straight
        return self._renderer.feed(batches) if batches else self._renderer.wait()

    def _pass_on(self, straight: Straight, take: Callable[[], list[Batch]]) -> bool:
        """See `reader.Aside`."""
        if not straight.is_open:
            return False
        straight.write(self._renderer.feed(take()))
        return not self._renderer.over

    async def _opening(self, flights: Sequence[Flight], reader: Reader) -> list[Batch]:
        """All that came until the headers can be sent; empty when the client left before, or needs a sign of
        life.

        Nothing is sent before the worker's first word: a request it refuses gets its status code. Only who
        waits for a worker as such gets comments, and what is wrong, if anything is, in an event. A request
        in a worker's queue is accepted and no more, so from there on the wait is short.
        """
        loop = asyncio.get_running_loop()
        while not (batches := await reader.batches(self._keepalive_s)):
            if reader.client_gone or all(flight.leg is None for flight in flights):
                return []
        held_until = loop.time() + HEADERS_HELD_S_MAX
        while not (reader.client_gone or _has_begun(batches) or cache_header.header(flights, self._prompts)):
            left_s = held_until - loop.time()
            if left_s <= 0:
                break
            batches += await reader.batches(left_s)
        return batches


def _has_begun(batches: Sequence[Batch]) -> bool:
    return any(not isinstance(item, Accepted | Reused) for _, items in batches for item in items)


def _start(content_type: bytes, length: int | None, cache: bytes | None) -> Message:
    headers = [(b"content-type", content_type), (b"cache-control", b"no-cache")]
    if cache is not None:
        headers.append((cache_header.HEADER, cache))
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _watch(receive: Receive, reader: Reader) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    reader.leave()
