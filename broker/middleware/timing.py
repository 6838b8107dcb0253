"""Processing time header of OpenAI's API, and counters of responses by status and error code."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.dispatch.traffic import HttpCounters
from broker.middleware.auth import PROBES, STATUS_STREAM
from broker.middleware.context import context_of
from broker.middleware.errors import ERROR_CODE

HEADER = b"openai-processing-ms"


class TimingMiddleware:
    """ASGI middleware that adds the time to the response's start, in milliseconds, and counts responses."""

    def __init__(self, app: ASGIApp, http_counters: HttpCounters) -> None:
        self._app = app
        self._http_counters = http_counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked_at = time.monotonic()

        async def send_with_time(message: Message) -> None:
            if message["type"] == "http.response.start":
                now = time.monotonic()
                took_ms = round((now - asked_at) * 1000)
                message["headers"] = [*message["headers"], (HEADER, b"%d" % took_ms)]
                self._count(scope, message["status"], message.get(ERROR_CODE), now)
            await send(message)

        await self._app(scope, receive, send_with_time)

    def _count(self, scope: Scope, status: int, code: str | None, now: float) -> None:
        self._http_counters.answered(status)
        if code is None or scope["path"] in PROBES:
            return
        self._http_counters.failed(code)
        id, method, path = context_of(scope).id, scope["method"], scope["path"]
        if (path, status) != (STATUS_STREAM, 401):
            self._http_counters.refused(now, id=id, method=method, path=path, status=status, code=code)
