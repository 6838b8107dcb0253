"""Error responses: the error object of the API that was called, and headers that tell clients whether to
retry."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from broker.dialects import anthropic, openai
from broker.middleware.context import context_of, request_id
from broker.middleware.json_response import JsonResponse
from protocol.common.log_context import about
from protocol.errors import Code, RequestError

Envelope = Callable[[RequestError, str], dict[str, Any]]
"""(error, request id) -> error document."""

ENVELOPES: tuple[tuple[str, Envelope], ...] = (
    ("/v1/messages", anthropic.error_object),
    ("", lambda error, request_id: openai.error_object(error)),
)
"""Envelopes by path prefix; the first match counts."""

ERROR_CODE = "roundhouse.error_code"
"""Key of the error's code in the message that starts an error response."""
_RETRIED = frozenset({409, *range(500, 600)})
"""Statuses that SDKs retry, unless a header says that it is in vain."""


class _ErrorResponse(JsonResponse):
    """Response to an error, which tells `TimingMiddleware` the error's code."""

    def __init__(self, error: RequestError, document: dict[str, Any], headers: dict[str, str]) -> None:
        super().__init__(document, error.kind.status, headers)
        self._code = error.code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_code(message: Message) -> None:
            await send({**message, ERROR_CODE: self._code.value})

        await super().__call__(scope, receive, send_with_code)


def error_response(error: RequestError, scope: Scope | None = None) -> Response:
    """Build the response for an error. `scope`: that of the request, if known."""
    path, id = (scope["path"], request_id(scope)) if scope else ("", "")
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif error.kind.status in _RETRIED and not error.kind.retryable:
        headers["x-should-retry"] = "false"
    if error.code is Code.REQUEST_TOO_LARGE:
        headers["connection"] = "close"
    envelope = next(envelope for beginning, envelope in ENVELOPES if path.startswith(beginning))
    return _ErrorResponse(error, envelope(error, id), headers)


def log_refusal(log: logging.Logger, scope: Scope, error: RequestError) -> None:
    """Log the refusal of a request by a middleware, which no route sees."""
    client = scope["client"][0] if scope.get("client") else "?"
    line, extra = (scope["method"], scope["path"], client), about(request_id=request_id(scope))
    log.info("%s %r from %s refused: %s", *line, error.message, extra=extra)


# --- Exception handlers of the routes: `HANDLERS`, by exception type ---------------------------------

log = logging.getLogger(__name__)

SEGMENTS_MAX = 8
"""Names of a path that are tried as the beginning of a route."""

Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if error.kind.status >= 500 and request.method == "POST":
        extra = about(request_id=context_of(request).id, code=error.code)
        log.warning("%s %s refused: %s", request.method, request.url.path, error, extra=extra)
    return error_response(error, request.scope)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405 and "sec-websocket-key" in request.headers:
        message = f"{path} has no WebSocket: send a POST, with 'stream' for server-sent events."
        refusal = RequestError(Code.WEBSOCKET_UNSUPPORTED, message)
    elif error.status_code == 405:
        refusal = RequestError(Code.METHOD_NOT_ALLOWED, f"{path} does not support {request.method}.")
    elif error.status_code == 404:
        meant = _meant(request, path)
        hint = f" Set the client's base URL so that it requests {meant}." if meant else ""
        if path.startswith("/api/") and not meant:
            hint = " Ollama's own API is not served: use OpenAI's, with a base URL that ends in /v1."
        refusal = RequestError(Code.ROUTE_NOT_FOUND, f"No route exists at {path}.{hint}")
    else:
        refusal = RequestError(Code.INVALID_REQUEST, error.detail)
    response = error_response(refusal, request.scope)
    response.headers.update(error.headers or {})
    if refusal.code is Code.WEBSOCKET_UNSUPPORTED:
        response.headers["upgrade"] = "HTTP/1.1"  # a 426 must name what the server speaks
    return response


def _meant(request: Request, path: str) -> str | None:
    """Return the route that ends like a path without one: `/v1` is missing or doubled, slashes are, or the
    path has the prefix of another server, such as Azure's `/openai/deployments/NAME`."""
    names = [name for name in path.split("/") if name]
    ends = (names[start:] for start in range(min(len(names), SEGMENTS_MAX)))
    candidates = (f"{prefix}/{'/'.join(end)}" for end in ends for prefix in ("", "/v1"))
    routes: Sequence[BaseRoute] = request.app.routes
    for candidate in candidates:
        scope = {**request.scope, "path": candidate}
        if any(route.matches(scope)[0] is Match.FULL for route in routes):
            return candidate
    return None


async def _on_client_disconnect(request: Request, error: Exception) -> Response:
    """The client disconnected while it sent its body; the response goes nowhere."""
    return Response(status_code=499)


async def _on_exception(request: Request, error: Exception) -> Response:
    extra = about(request_id=context_of(request).id)
    log.error("%s %s failed", request.method, request.url.path, exc_info=error, extra=extra)
    return error_response(RequestError(Code.INTERNAL_ERROR), request.scope)


HANDLERS: dict[type[Exception], Handler] = {
    RequestError: _on_request_error,
    HTTPException: _on_http_exception,
    ClientDisconnect: _on_client_disconnect,
    Exception: _on_exception,
}
