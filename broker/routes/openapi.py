"""GET /openapi.json: what can be asked here, for programs. It needs a key wherever the rest does."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.dialects import openapi
from broker.routes.gateway import gateway_of
from broker.routes.report import version


async def describe(request: Request) -> Response:
    """The document, made once."""
    keyed = gateway_of(request).keyring.required
    return Response(openapi.written(version=version(), keyed=keyed), media_type="application/json")


ROUTES = [Route("/openapi.json", describe)]
