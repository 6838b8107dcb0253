"""Lines of batches as requests: through the same routes as requests of clients, without a connection.

`RequestContext.is_batch_line` marks them.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message

from broker.api.batches.lines import Line, LineAnswer
from broker.api.batches.records import BatchRecord
from broker.api.batches.runner import Send
from broker.dialects import anthropic, openai
from broker.dialects.body import encode
from broker.middleware.context import CONTEXT, RequestContext, new_request_id
from broker.state import GatewayState
from protocol.errors import Code, RequestError

_HEADERS = [(b"content-type", b"application/json"), (b"host", b"localhost")]


def sender(gateway: GatewayState, app: ASGIApp) -> Send:
    """Return the function that sends lines to `app`, with an API key of the batch's owner."""

    async def send(batch: BatchRecord, line: Line) -> LineAnswer:
        key = None
        if batch.owner or gateway.api_keys_store.required:
            key = gateway.api_keys_store.of_namespace(batch.owner)
            if key is None:
                return _refused(batch)
        with gateway.media.lease() as media:
            context = RequestContext(new_request_id(), media, key=key, is_batch_line=True)
            status, body = await _post(app, batch.endpoint, line.body, context)
        return LineAnswer(status, context.id, body)

    return send


async def _post(app: ASGIApp, path: str, body: bytes, context: RequestContext) -> tuple[int, bytes]:
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


def _refused(batch: BatchRecord) -> LineAnswer:
    error = RequestError(Code.INVALID_API_KEY, "The API key that created this batch is no longer valid.")
    is_anthropic = batch.dialect == "anthropic"
    document = anthropic.error_object(error) if is_anthropic else openai.error_object(error)
    return LineAnswer(error.kind.status, "", encode(document))
