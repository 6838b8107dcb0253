"""GET /metrics: the figures as Prometheus metrics, read when they are scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.api.admin.report import gateway_counts, version
from broker.api.admin.status_routes import durable_status
from broker.dispatch.figures import GATEWAY_FIGURES, MODEL_FIGURES, Figure, ModelFigures, Value
from broker.dispatch.traffic import Histogram
from broker.state import GatewayState, gateway_of

PATH = "/metrics"

REASONS_MAX = 16
"""Maximum number of values of a counter's label, the most frequent ones; the rest is summed as `other`."""

_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class PrometheusExporter(Collector):
    """Prometheus exporter: collector of one gateway's metrics."""

    def __init__(self, gateway: Mapping[str, Any], models: ModelFigures) -> None:
        """`gateway`: what the figures of the gateway are read from."""
        self._gateway = gateway
        self._models = models

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("roundhouse_build", "Version of the gateway.", value={"version": version()})
        for figure in GATEWAY_FIGURES:
            if (value := figure.value(self._gateway)) is not None:
                yield _family(figure, (), [((), value)])
        models = self._models.snapshots()
        for each in MODEL_FIGURES:
            yield _family(each, ("model",), [((model.name,), each.value(model)) for model in models])


def _family(
    figure: Figure[Any], labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], Value]]
) -> Metric:
    """Return the metric of a figure. `values`: with values for `labels`."""
    name = f"roundhouse_{figure.name}" + ("_seconds" if figure.kind == "histogram" else "")
    family = _FAMILIES[figure.kind](name, figure.help, labels=(*labels, *figure.labels))
    for own, value in values:
        if isinstance(value, Histogram):
            bounds = [*map(str, value.bounds), "+Inf"]
            family.add_metric(own, list(zip(bounds, value.cumulative(), strict=True)), value.sum)
        elif isinstance(value, Mapping):
            for keys, number in _by_labels(figure, value):
                family.add_metric((*own, *keys), number)
        elif value is not None:
            family.add_metric(own, value)
    return cast(Metric, family)


def _by_labels(figure: Figure[Any], values: Mapping[Any, float]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the numbers of a mapping by their labels."""
    if len(figure.labels) > 1:
        yield from values.items()
        return
    found = Counter(values).most_common()
    most = REASONS_MAX if figure.kind == "counter" else len(found)
    yield from (((key,), number) for key, number in found[:most])
    if rest := sum(number for _, number in found[most:]):
        yield ("other",), rest


async def metrics(request: Request) -> Response:
    """Return the metrics in the format that the scraper prefers."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    body: bytes = encode(registry(gateway_of(request)))
    return Response(body, headers={"content-type": content_type})


def registry(gateway: GatewayState) -> CollectorRegistry:
    """Return a registry with all metrics, including those of the gateway's process if the system provides
    them."""
    found = CollectorRegistry(auto_describe=False)
    dispatcher, batches = gateway.dispatcher, gateway.batches
    status = {
        **gateway_counts(dispatcher, gateway.http_counters, gateway.line_errors),
        "durable": durable_status(gateway),
        "batches": None if batches is None else batches.overview(),
    }
    found.register(PrometheusExporter(status, dispatcher.figures))
    ProcessCollector(registry=found)
    return found


ROUTES = [Route(PATH, metrics)]
