"""Request ids: each response carries one, so that it can be found in the log."""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
ANTHROPICS = b"request-id"
"""Name of the header in Anthropic's API."""
_SANE = re.compile(rb"[\x21-\x7e]{1,128}")


def new_request_id() -> bytes:
    return b"req_" + secrets.token_hex(12).encode()


def request_id(scope: Scope) -> str:
    """Return the request's id; empty if it has not passed `RequestIdMiddleware`."""
    return str(scope.get("state", {}).get("request_id", ""))


class RequestIdMiddleware:
    """ASGI middleware that returns the client's request id, or a new one if that is missing or malformed.

    The id is stored in the request's state as `request_id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER, b"")
        id = given if _SANE.fullmatch(given) else new_request_id()
        scope.setdefault("state", {})["request_id"] = id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (HEADER, id), (ANTHROPICS, id)]
            await send(message)

        await self._app(scope, receive, send_with_id)
