"""ASGI response of one reader of an answer: what it has so far, then live, to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from broker.answers.answer import Answer
from broker.middleware.errors import error_response
from broker.server.fast_path import FastPath, find
from protocol.errors import Code, RequestError

EVENT_END = b"\n\n"
"""End of a server-sent event; the JSON in it has no line breaks."""


@dataclass(slots=True)
class StreamCursor:
    """Position from which a stream is read: behind its first `events` events, or its first `nbytes` bytes."""

    events: int = 0
    """Keepalives do not count."""
    nbytes: int = 0

    def skip(self, body: bytes, keepalive: bytes) -> bytes:
        """Return what is behind the position of the next part of the stream, which ends with an event."""
        start = min(self.nbytes, len(body))
        self.nbytes -= start
        while self.events and start < len(body):
            end = body.index(EVENT_END, start) + len(EVENT_END)
            self.events -= body[start:end] != keepalive
            start = end
        return body[start:]


class RenderingError(RuntimeError):
    """Raised to close a connection whose response cannot be completed."""


class AnswerResponse:
    """Sends an answer from its beginning on: an event stream, or one document.

    Once the response has begun, outputs go to the fast path from the callback that renders them. The task
    sleeps meanwhile: it sends the beginning, the end, keepalives, and whatever the client is too slow for.
    """

    def __init__(self, answer: Answer, keepalive_s: float, cursor: StreamCursor | None = None) -> None:
        """`cursor`: where to begin in an answer that is streamed to this client in any case; None: the client
        gets what its request asked for."""
        self.answer = answer
        self._keepalive_s = keepalive_s
        self._position = 0
        """Number of the answer's chunks that were read."""
        self._cursor = cursor
        self._waiter: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fast_path: FastPath | None = None
        """Where to write without waking the task; None: nowhere."""
        self._loop = asyncio.get_running_loop()
        self._has_left = False
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.answer.attach(self._wake)
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            error = await self._serve(send, find(scope))
        finally:
            watcher.cancel()
            self.answer.detach(self._wake)
        if error is not None:
            await error_response(error, scope)(scope, receive, send)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._wake_task(has_news=True)

    async def _serve(self, send: Send, fast_path: FastPath | None) -> RequestError | None:
        """Send the answer; return its error instead if nothing was sent. Raises `RenderingError`."""
        answer, has_started, keepalive = self.answer, False, b""
        while not self._has_left:
            body, keepalive = self._take() or keepalive, b""
            if self._cursor is None and answer.whole is not None:
                body = b""  # the document is sent once the response is recorded
                if answer.visible:
                    await self._send_whole(send, answer.whole)
                    return None
            is_last = answer.ends_at(self._position)
            error = answer.end.error if is_last and answer.end is not None else None
            if error is not None and not has_started:
                return error
            if error is not None and error.code is Code.INTERNAL_ERROR:
                raise RenderingError(error.message)
            if body or is_last:
                if not has_started:
                    has_started = True
                    await send(self._start(len(body) if is_last else None))
                await self._send(send, body, more=not is_last)
            if is_last:
                return None
            if self._position == answer.visible and not answer.ends_at(self._position):
                self._fast_path = fast_path if has_started else None
                keepalive = b"" if await self._wait() else answer.idle()
        return None

    def _take(self) -> bytes:
        body, self._position = self.answer.read(self._position)
        if self._cursor is None or self.answer.renderer is None:
            return body
        return self._cursor.skip(body, self.answer.renderer.keepalive())

    def _start(self, length: int | None) -> Message:
        renderer = self.answer.renderer
        kind = renderer.content_type if renderer is not None else b"application/json"
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache"), *self.answer.headers]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        return {"type": "http.response.start", "status": 200, "headers": headers}

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        self.answer.pause()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self.answer.resume()

    async def _send_whole(self, send: Send, document: bytes) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(document))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": document, "more_body": False})

    # --- waiting ---

    async def _wait(self) -> bool:
        """Wait for more, or for the end. Return False if nothing was sent for the keepalive interval."""
        self._waiter, self._sent_at = self._loop.create_future(), self._loop.time()
        self._timer = self._loop.call_later(self._keepalive_s, self._on_timer)
        try:
            return await self._waiter
        finally:
            self._timer.cancel()
            self._waiter = self._fast_path = None

    def _on_timer(self) -> None:
        """Start one timer for the rest of the interval, instead of one for each output on the fast path."""
        left_s = self._sent_at + self._keepalive_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._on_timer)
        else:
            self._wake_task(has_news=False)

    def _wake(self) -> None:
        """Send what is new, on the fast path or by the task."""
        fast_path = self._fast_path
        if fast_path is None or self.answer.end is not None or not fast_path.is_open:
            self._wake_task(has_news=True)
        elif self._waiter is not None and not self._waiter.done():
            fast_path.write(self._take())
            self._sent_at = self._loop.time()

    def _wake_task(self, *, has_news: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(has_news)
