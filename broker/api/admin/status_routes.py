"""GET /v1/status: the gateway, its workers and their requests; /v1/status/stream repeats it every second.

GET /health and /ready need no key (`PROBES`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import asdict
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
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from broker.api.admin import report
from broker.api.admin.report import StatusSnapshot, gateway_counts, version
from broker.dialects.body import encode
from broker.dispatch.figures import GATEWAY_FIGURES, MODEL_FIGURES, Figure, ModelFigures, Value
from broker.dispatch.history import SAMPLE_S
from broker.dispatch.traffic import Histogram
from broker.middleware.auth import STATUS_STREAM
from broker.middleware.json_response import JsonResponse
from broker.requests.status_streams import check_watchers, watching
from broker.state import GatewayState, gateway_of


async def show_status(request: Request) -> Response:
    """Return the status as of the last heartbeats; without the samples if `history` is `false`."""
    wants_history = request.query_params.get("history") != "false"
    return JsonResponse(_document(gateway_of(request), since=0 if wants_history else None))


async def stream_status(request: Request) -> Response:
    """Stream the status as server-sent events: the first has all samples, the others only the new ones."""
    gateway = gateway_of(request)
    check_watchers(gateway)
    headers = {"cache-control": "no-cache"}
    if request.method == "HEAD":
        return Response(media_type="text/event-stream", headers=headers)
    return StreamingResponse(_events(gateway), media_type="text/event-stream", headers=headers)


async def _events(gateway: GatewayState) -> AsyncIterator[bytes]:
    taken = 0
    with watching(gateway):
        while not gateway.dispatcher.stopping:
            document = _document(gateway, since=taken)
            taken = gateway.dispatcher.history.taken
            yield b"event: status\ndata: " + encode(document) + b"\n\n"
            await asyncio.sleep(SAMPLE_S)


def _document(gateway: GatewayState, *, since: int | None) -> dict[str, Any]:
    """`since`: number of samples that the client has already; None for no samples."""
    dispatcher, moment = gateway.dispatcher, StatusSnapshot(time.monotonic(), time.time())
    document = report.status(
        dispatcher,
        gateway.http_counters,
        gateway.line_errors,
        moment,
        gateway.started_at,
        gateway.media.held,
        [kept.flight.id for kept in gateway.inspection.kept] if gateway.inspection else None,
    )
    document["durable"] = durable_status(gateway)
    document["batches"] = gateway.batches.overview() if gateway.batches is not None else None
    if since is not None:
        document["history"] = report.history(dispatcher.history.since(since), moment)
    return document


def durable_status(gateway: GatewayState) -> dict[str, Any]:
    """Return what outlives its client, and the journal; None: there is none."""
    answers, journal = gateway.answers, gateway.journal
    return {
        "answers": len(answers),
        "running": answers.running,
        "queued": gateway.deferred.responses,
        "bytes": answers.nbytes,
        "counts": dict(answers.counts),
        "journal": asdict(journal.status()) if journal.is_durable else None,
    }


async def health(request: Request) -> Response:
    """Report that the gateway is alive."""
    return JsonResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Report whether any model serves or can be loaded on demand; otherwise 503 with the reason and
    Retry-After."""
    gateway_of(request).dispatcher.check_ready()
    return JsonResponse({"status": "ready"})


# --- GET /metrics: the figures as Prometheus metrics, read when they are scraped ---------------------

METRICS_PATH = "/metrics"

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


ROUTES = [
    Route("/v1/status", show_status),
    Route(STATUS_STREAM, stream_status),
    Route("/health", health),
    Route("/ready", ready),
    Route(METRICS_PATH, metrics),
]
