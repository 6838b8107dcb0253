"""Exception handlers of the routes: `HANDLERS`, by exception type."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from broker.http.errors import error_response
from broker.http.ids import request_id
from protocol.errors import Code, RequestError
from protocol.log_context import about

log = logging.getLogger(__name__)

Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if error.kind.status >= 500 and request.method == "POST":
        told = about(request_id=request_id(request.scope), code=error.code)
        log.warning("%s %s refused: %s", request.method, request.url.path, error, extra=told)
    return error_response(error, request.scope)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        refusal = RequestError(Code.METHOD_NOT_ALLOWED, f"{path} does not support {request.method}.")
    elif error.status_code == 404:
        refusal = RequestError(Code.ROUTE_NOT_FOUND, f"No route exists at {path}.")
    else:
        refusal = RequestError(Code.INVALID_REQUEST, error.detail)
    response = error_response(refusal, request.scope)
    response.headers.update(error.headers or {})
    return response


async def _on_client_disconnect(request: Request, error: Exception) -> Response:
    """The client disconnected while it sent its body; the response goes nowhere."""
    return Response(status_code=499)


async def _on_exception(request: Request, error: Exception) -> Response:
    told = about(request_id=request_id(request.scope))
    log.error("%s %s failed", request.method, request.url.path, exc_info=error, extra=told)
    return error_response(RequestError(Code.INTERNAL_ERROR), request.scope)


HANDLERS: dict[type[Exception], Handler] = {
    RequestError: _on_request_error,
    HTTPException: _on_http_exception,
    ClientDisconnect: _on_client_disconnect,
    Exception: _on_exception,
}
