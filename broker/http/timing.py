"""How long an answer took to begin, as OpenAI's clients look for it; and what kind of answer it is."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.dispatch.tally import Tally
from broker.http.ids import request_id
from broker.http.probes import PROBES

HEADER = b"openai-processing-ms"
ERROR_CODE = "error_code"
"""In the state of a request: with what error it is answered."""


class Timing:
    """ASGI middleware: every answer says how many milliseconds after its request it began, and is counted."""

    def __init__(self, app: ASGIApp, tally: Tally) -> None:
        self._app = app
        self._tally = tally

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
                self._count(scope, message["status"], now)
            await send(message)

        await self._app(scope, receive, send_with_time)

    def _count(self, scope: Scope, status: int, now: float) -> None:
        self._tally.answered(status)
        code = scope.get("state", {}).get(ERROR_CODE)
        if code is None:
            return
        self._tally.failed(code)
        id, method, path = request_id(scope), scope["method"], scope["path"]
        if path not in PROBES:
            self._tally.refused(now, id=id, method=method, path=path, status=status, code=code)
