"""ASGI responses over flights: an event stream or one JSON document. Also reads bodies with a size limit.

The response header `x-roundhouse-schema-relaxed` names the keywords of the request's JSON schema that the
answer may violate, because they cannot be enforced; it is absent if the answer matches the whole schema.
"""

from __future__ import annotations

import asyncio
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from broker.dialects.renderers import Renderer
from broker.dispatch.flight import Batch, Flight
from broker.middleware.errors import error_response
from broker.requests import cache_header
from broker.requests.output_reader import OutputReader
from broker.server.fast_path import FastPath, find
from protocol.errors import Code, RequestError
from protocol.messages import Accepted, PrefixHit

RELAXED_HEADER = b"x-roundhouse-schema-relaxed"
HEADERS_HELD_S_MAX = 1.0
"""Maximum time in seconds that the response headers wait, after acceptance, for the prefix cache report."""


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return the whole body, without a byte order mark. Raises `RequestError(request_too_large)`, early if
    the size is declared."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > bytes_max:
            raise _too_large(bytes_max)
        chunks.append(chunk)
    return b"".join(chunks).removeprefix(BOM_UTF8)


def opening_headers(prompts: int, flights: Sequence[Flight]) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Return the headers that flights add to their response, and whether the prefix cache has reported."""
    headers: list[tuple[bytes, bytes]] = []
    if (cache := cache_header.header(flights, prompts)) is not None:
        headers.append((cache_header.HEADER, cache))
    if relaxed := sorted({keyword for flight in flights for keyword in flight.relaxed}):
        headers.append((RELAXED_HEADER, ", ".join(relaxed).encode()))
    return headers, cache is not None


def _too_large(bytes_max: int) -> RequestError:
    return RequestError(Code.REQUEST_TOO_LARGE, f"The request body is larger than {bytes_max} bytes.")


class GenerationResponse:
    """ASGI response to one request from its flights, one per choice.

    Their context is open exactly as long as the client is served. However the response ends (last event, a
    failed flight, disconnect or cancellation), the slots are freed and the worker is notified.
    """

    def __init__(
        self,
        assigned: AbstractContextManager[Sequence[Flight]],
        renderer: Renderer,
        *,
        prompts: int,
        keepalive_s: float,
        on_end: Callable[[Flight, int], None],
    ) -> None:
        """`prompts`: number of prompts; the flights are grouped by prompt, equally many for each."""
        self._assigned = assigned
        self._prompts = prompts
        self._renderer = renderer
        self._keepalive_s = keepalive_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # logged for a client that disconnected before its response
        try:
            with self._assigned as flights:
                reader = OutputReader(flights)
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
        self, flights: Sequence[Flight], reader: OutputReader, send: Send, straight: FastPath | None
    ) -> int:
        started = False
        batches = await self._opening(flights, reader)
        while not reader.client_gone:
            body = self._render(batches)
            over = self._renderer.over
            if body or over:
                if not started:
                    started = True
                    await send(self._start(flights, len(body) if over else None))
                await _send_body(flights, send, body, over=over)
            if over:
                return 200
            if started and straight is not None:
                reader.offload = partial(self._pass_on, straight)
            batches = await reader.batches(self._keepalive_s if started else None)
        return 499

    def _start(self, flights: Sequence[Flight], length: int | None) -> Message:
        headers = [(b"content-type", self._renderer.content_type), (b"cache-control", b"no-cache")]
        headers += opening_headers(self._prompts, flights)[0]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        return {"type": "http.response.start", "status": 200, "headers": headers}

    def _render(self, batches: Sequence[Batch]) -> bytes:
        if self._renderer.over:
            return b""  # the fast path has sent the last bytes
        return self._renderer.feed(batches) if batches else self._renderer.wait()

    def _pass_on(self, straight: FastPath, take: Callable[[], list[Batch]]) -> bool:
        """Write new outputs to the fast path, as an `output_reader.Aside`."""
        if not straight.is_open:
            return False
        straight.write(self._renderer.feed(take()))
        return not self._renderer.over

    async def _opening(self, flights: Sequence[Flight], reader: OutputReader) -> list[Batch]:
        """Collect items until the headers can be sent; empty if the client left or needs a keepalive.

        Nothing is sent before the worker's first message, so that a request it rejects gets its status code.
        A request that waits for a worker is the exception: it gets comments, and an error as an event. A
        request in a worker's queue is accepted already, so from there on the wait is short.
        """
        loop = asyncio.get_running_loop()
        while not (batches := await reader.batches(self._keepalive_s)):
            if reader.client_gone or all(flight.attempt is None for flight in flights):
                return []
        held_until = loop.time() + HEADERS_HELD_S_MAX
        while not (reader.client_gone or _has_begun(batches) or cache_header.header(flights, self._prompts)):
            left_s = held_until - loop.time()
            if left_s <= 0:
                break
            batches += await reader.batches(left_s)
        return batches


async def _send_body(flights: Sequence[Flight], send: Send, body: bytes, *, over: bool) -> None:
    """Send a part of the body. Meanwhile the flights count as unread: `send` waits for the client to read."""
    since = time.monotonic()
    for flight in flights:
        flight.unread_since = since
    await send({"type": "http.response.body", "body": body, "more_body": not over})
    for flight in flights:
        flight.unread_since = None


def _has_begun(batches: Sequence[Batch]) -> bool:
    return any(not isinstance(item, Accepted | PrefixHit) for _, items in batches for item in items)


async def _watch(receive: Receive, reader: OutputReader) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    reader.leave()
