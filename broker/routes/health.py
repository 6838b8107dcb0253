"""GET /health and /ready, which need no key (`http.probes`)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from broker.routes.gateway import gateway_of


async def health(request: Request) -> Response:
    """The gateway lives."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Some model serves, or is started when asked for; otherwise 503 with the reason and a Retry-After."""
    gateway_of(request).dispatcher.check_ready()
    return JSONResponse({"status": "ready"})


ROUTES = [Route("/health", health), Route("/ready", ready)]
