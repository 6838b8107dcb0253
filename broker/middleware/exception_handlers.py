"""Exception handlers of the routes: `HANDLERS`, by exception type."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from broker.middleware.context import context_of
from broker.middleware.errors import error_response
from protocol.common.log_context import about
from protocol.errors import Code, RequestError

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
