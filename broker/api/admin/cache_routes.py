"""GET /v1/cache: prefix cache statistics by model. DELETE /v1/cache[?model=…]: clear the caches.

Where several API keys have prefixes of their own, a key clears only its own; the statistics are of all.
"""

from __future__ import annotations

import asyncio
import secrets

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.api.admin import report
from broker.dispatch.cache_clear import CacheClear
from broker.dispatch.dispatcher import Dispatcher
from broker.middleware.context import context_of
from broker.middleware.json_response import JsonResponse
from broker.state import gateway_of
from protocol.errors import Code, RequestError

CLEAR_WAIT_S_MAX = 5.0


async def cache(request: Request) -> Response:
    """Handle GET and DELETE."""
    dispatcher = gateway_of(request).dispatcher
    if request.method == "DELETE":
        model, namespace = request.query_params.get("model"), _own_namespace(request)
        return JsonResponse(report.freed(await _clear(dispatcher, model, namespace)))
    return JsonResponse(report.caches(dispatcher.fleet))


def _own_namespace(request: Request) -> str:
    """Return the namespace that the request may clear; empty, for all, if no other key has one."""
    gateway = gateway_of(request)
    namespace = gateway.prefix_namespace(context_of(request))
    others = gateway.api_keys_store.prefix_namespaces - {namespace}
    return namespace if others else ""


async def _clear(dispatcher: Dispatcher, model: str | None, namespace: str) -> CacheClear:
    """Clear a namespace in the prefix caches of the workers of `model` (None: of all); return what was freed.

    Raises `RequestError` if there is no worker, one is lost meanwhile, or one does not reply in time.
    """
    with dispatcher.clear(model, "clear-" + secrets.token_hex(12), namespace) as cache_clear:
        over = asyncio.Event()
        cache_clear.on_over = over.set
        try:
            async with asyncio.timeout(CLEAR_WAIT_S_MAX):
                await over.wait()
        except TimeoutError:
            names = ", ".join(sorted(set(cache_clear.awaited.values())))
            message = f"No reply from {names} within {CLEAR_WAIT_S_MAX:g} s; its cache may still be cleared."
            raise RequestError(Code.DEADLINE_EXCEEDED, message) from None
        if cache_clear.died is not None:
            message = f"The worker for {cache_clear.died} was lost before its cache was cleared."
            raise RequestError(Code.WORKER_UNAVAILABLE, message, retry_after_s=1.0)
        return cache_clear


ROUTES = [Route("/v1/cache", cache, methods=["GET", "DELETE"])]
