"""ASGI response of one reader of a durable answer: from a position on, then live, to its end."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send

from broker.answers.answer import DurableAnswer
from broker.middleware.errors import error_response
from broker.server.fast_path import FastPath, find
from protocol.errors import RequestError

EVENT_END = b"\n\n"
"""End of a server-sent event; the JSON in it has no line breaks."""


class AnswerResponse:
    """Sends a durable answer from its beginning on. A client that leaves ends nothing."""

    def __init__(self, answer: DurableAnswer, keepalive_s: float, skipped: int | None = None) -> None:
        """`skipped`: number of events to leave out, of an answer that is streamed to this client in any case;
        None: it gets what its request asked for."""
        self._answer = answer
        self._keepalive_s = keepalive_s
        self._position = 0
        self._skipped = skipped or 0
        self._may_be_whole = skipped is None
        self._waiter: asyncio.Future[None] | None = None
        self._straight: FastPath | None = None
        self._clock = asyncio.get_running_loop().time
        self._gone = False
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._answer.attach(self._wake)
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            await self._serve(send, find(scope))
        except RequestError as error:
            await error_response(error, scope)(scope, receive, send)
        finally:
            watcher.cancel()
            self._answer.detach(self._wake)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._release()

    async def _serve(self, send: Send, straight: FastPath | None) -> None:
        answer, started = self._answer, False
        body = self._take()
        while not self._gone:
            over = answer.over and self._position == len(answer.chunks)
            if self._may_be_whole and answer.whole is not None and answer.visible:
                await self._send_whole(send, answer.whole())
                return
            if over and not body and not started and answer.error is not None:
                raise answer.error
            if self._may_be_whole and answer.whole is not None:
                body = b""  # the document is sent once the response is recorded
            elif body or over:
                if not started:
                    started = True
                    await send(self._start(len(body) if over else None))
                await send({"type": "http.response.body", "body": body, "more_body": not over})
            if over:
                return
            if self._position < answer.visible or (answer.over and self._position == len(answer.chunks)):
                body = self._take()
                continue
            self._straight = straight if started else None
            body = self._take() if await self._more() else answer.idle() or self._take()

    async def _send_whole(self, send: Send, document: bytes) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(document))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": document, "more_body": False})

    def _take(self) -> bytes:
        body = self._answer.read(self._position)
        self._position = self._answer.visible
        while self._skipped and body:
            _, _, body = body.partition(EVENT_END)
            self._skipped -= 1
        return body

    def _start(self, length: int | None) -> dict[str, Any]:
        renderer = self._answer.renderer
        kind = renderer.content_type if renderer is not None else b"application/json"
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache"), *self._answer.headers]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        return {"type": "http.response.start", "status": 200, "headers": headers}

    # --- waiting ---

    async def _more(self) -> bool:
        """Wait for more, or for the end. Return False if nothing was sent for the keepalive interval."""
        self._waiter, self._sent_at = asyncio.get_running_loop().create_future(), self._clock()
        try:
            while True:
                left_s = self._sent_at + self._keepalive_s - self._clock()
                if left_s <= 0:
                    return False
                done, _ = await asyncio.wait([self._waiter], timeout=left_s)
                if done:
                    return True
        finally:
            self._waiter.cancel()
            self._waiter = self._straight = None

    def _wake(self) -> None:
        """Send what is new, on the fast path or by the waiter."""
        waiter, straight, answer = self._waiter, self._straight, self._answer
        if waiter is None or waiter.done():
            return  # a reader that is awake checks by itself
        if straight is None or answer.over or not straight.is_open:
            waiter.set_result(None)
            return
        straight.write(self._take())
        self._sent_at = self._clock()

    def _release(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
