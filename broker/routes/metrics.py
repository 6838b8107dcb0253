"""GET /metrics: Prometheus metrics, collected when they are scraped."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.routes.prometheus import PrometheusExporter
from broker.routes.state import GatewayState, gateway_of

PATH = "/metrics"


async def metrics(request: Request) -> Response:
    """Return the metrics in the format that the scraper prefers."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    body: bytes = encode(registry(gateway_of(request)))
    return Response(body, headers={"content-type": content_type})


def registry(gateway: GatewayState) -> CollectorRegistry:
    """Return a registry with all metrics, including those of the gateway's process if the system provides
    them."""
    found = CollectorRegistry(auto_describe=False)
    found.register(PrometheusExporter(gateway.dispatcher, gateway.http_counters, gateway.line_errors))
    ProcessCollector(registry=found)
    return found


ROUTES = [Route(PATH, metrics)]
