"""GET /v1/cache: the prefix caches, by model. DELETE /v1/cache[?model=…]: empty them."""

from __future__ import annotations

import asyncio
import secrets

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from broker.dispatch.clearing import Clearing
from broker.dispatch.dispatcher import Dispatcher
from broker.routes import report
from broker.routes.gateway import gateway_of
from protocol.errors import Code, RequestError

CLEAR_WAIT_S_MAX = 5.0


async def cache(request: Request) -> Response:
    """Both methods."""
    dispatcher = gateway_of(request).dispatcher
    if request.method == "DELETE":
        return JSONResponse(report.freed(await _clear(dispatcher, request.query_params.get("model"))))
    return JSONResponse(report.caches(dispatcher.fleet))


async def _clear(dispatcher: Dispatcher, model: str | None) -> Clearing:
    """Have the workers that serve `model` (None: all who serve) forget their prefixes; what that gave back.

    Raises `RequestError`: nobody serves, one of them died meanwhile, or did not answer in time.
    """
    with dispatcher.clear(model, "clear-" + secrets.token_hex(12)) as clearing:
        over = asyncio.Event()
        clearing.on_over = over.set
        try:
            async with asyncio.timeout(CLEAR_WAIT_S_MAX):
                await over.wait()
        except TimeoutError:
            names = ", ".join(sorted(set(clearing.awaited.values())))
            message = f"No answer from {names} within {CLEAR_WAIT_S_MAX:g} s; it may still clear its cache."
            raise RequestError(Code.DEADLINE_EXCEEDED, message) from None
        if clearing.died is not None:
            message = f"The worker for {clearing.died} died before its cache was cleared."
            raise RequestError(Code.WORKER_UNAVAILABLE, message, retry_after_s=1.0)
        return clearing


ROUTES = [Route("/v1/cache", cache, methods=["GET", "DELETE"])]
