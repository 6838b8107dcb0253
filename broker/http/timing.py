"""How long an answer took to begin, as OpenAI's clients look for it."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"openai-processing-ms"


class Timing:
    """ASGI middleware: every answer says how many milliseconds after its request it began."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked_at = time.monotonic()

        async def send_with_time(message: Message) -> None:
            if message["type"] == "http.response.start":
                took_ms = round((time.monotonic() - asked_at) * 1000)
                message["headers"] = [*message["headers"], (HEADER, b"%d" % took_ms)]
            await send(message)

        await self._app(scope, receive, send_with_time)
