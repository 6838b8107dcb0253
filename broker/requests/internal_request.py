"""Requests of the gateway to itself: through the routes, as an HTTP request, and without a connection."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message

from broker.middleware.context import CONTEXT, RequestContext

_HEADERS = [(b"content-type", b"application/json"), (b"host", b"localhost")]


async def post(app: ASGIApp, path: str, body: bytes, context: RequestContext) -> tuple[int, bytes]:
    """Send a POST request to `app`; return the status and the body of the whole response.

    Cancelling it is the departure of the client. Raises `RuntimeError` if there is no response.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [*_HEADERS, (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
        CONTEXT: context,
    }
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, pieces = 0, []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Future()  # the client stays until it is cancelled
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # logged by the handler that has sent the response
        if not status:
            raise
    if not status:
        raise RuntimeError(f"no response from {path}")
    return status, b"".join(pieces)
