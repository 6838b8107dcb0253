"""GET /v1/status: the gateway, its workers, and where each of their requests stands."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from broker.routes import report
from broker.routes.gateway import gateway_of


async def show_status(request: Request) -> Response:
    """All of it, as of the last heartbeats."""
    gateway = gateway_of(request)
    uptime_s = time.monotonic() - gateway.started_at
    told = report.status(gateway.dispatcher, uptime_s, gateway.line_errors, gateway.media.held)
    return JSONResponse(told)


ROUTES = [Route("/v1/status", show_status)]
