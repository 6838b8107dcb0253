"""GET /openapi.json: the OpenAPI document. It needs a key if the other routes do."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.api.admin.report import version
from broker.api.openapi import document as openapi
from broker.state import gateway_of


async def describe(request: Request) -> Response:
    """Return the document, which is built once."""
    keyed = gateway_of(request).api_keys_store.required
    return Response(openapi.written(version=version(), keyed=keyed), media_type="application/json")


ROUTES = [Route("/openapi.json", describe)]
