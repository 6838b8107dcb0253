"""GET /health and /ready; they need no key (`http.probes`)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from broker.routes.state import gateway_of


async def health(request: Request) -> Response:
    """Report that the gateway is alive."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Report whether any model serves or can be loaded on demand; otherwise 503 with the reason and
    Retry-After."""
    gateway_of(request).dispatcher.check_ready()
    return JSONResponse({"status": "ready"})


ROUTES = [Route("/health", health), Route("/ready", ready)]
