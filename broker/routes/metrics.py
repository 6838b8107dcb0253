"""GET /metrics: what Prometheus asks for now and then, and what is put together only then."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.routes.figures import Figures
from broker.routes.gateway import Gateway, gateway_of

PATH = "/metrics"


async def metrics(request: Request) -> Response:
    """In the format that the scraper prefers."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    body: bytes = encode(registry(gateway_of(request)))
    return Response(body, headers={"content-type": content_type})


def registry(gateway: Gateway) -> CollectorRegistry:
    """All that is measured, with the gateway's own process where the system tells of it."""
    found = CollectorRegistry(auto_describe=False)
    found.register(Figures(gateway.dispatcher, gateway.tally, gateway.line_errors))
    ProcessCollector(registry=found)
    return found


ROUTES = [Route(PATH, metrics)]
