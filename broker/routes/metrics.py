"""GET /metrics: Prometheus metrics, collected when they are scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

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

from broker.batches.runner import BatchRunner
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import Worker
from broker.dispatch.traffic import Histogram, HttpCounters, ModelTraffic
from broker.routes.report import version
from broker.routes.state import GatewayState, gateway_of
from broker.routes.status import durable_status
from protocol.types import PrefixStatus

PATH = "/metrics"

REASONS_MAX = 16
"""Maximum number of label values, the most frequent ones; the rest is summed as `other`."""


class PrometheusExporter(Collector):
    """Prometheus exporter: collector of one gateway's metrics, computed at scrape time.

    Labels are bounded: models that the fleet knows, and codes and reasons of fixed tables; any other name
    that a worker sends becomes `other`. Ids are never labels.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        http_counters: HttpCounters,
        line_errors: Mapping[str, int],
        durable: Callable[[], Mapping[str, Any]],
        batches: BatchRunner | None = None,
    ) -> None:
        """`durable`: returns the status of what outlives its client."""
        self._batches = batches
        self._dispatcher = dispatcher
        self._told = durable
        self._http_counters = http_counters
        self._line_errors = line_errors

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("roundhouse_build", "Version of the gateway.", value={"version": version()})
        yield from self._http()
        yield from self._durable()
        yield from self._traffic()
        yield from self._requests()
        yield from self._workers()
        yield from self._prefixes()
        yield from self._adapters()
        if self._batches is not None:
            yield from _of_batches(self._batches.overview())

    def _http(self) -> Iterator[Metric]:
        statuses = {str(status): count for status, count in self._http_counters.statuses.items()}
        yield _counts("http_responses", "HTTP responses by status code.", "code", statuses)
        yield _counts("errors", "HTTP error responses by error code.", "code", self._http_counters.errors)
        yield _counts(
            "line_errors", "Errors of the transport to the workers, by reason.", "reason", self._line_errors
        )
        dropped = self._dispatcher.dropped
        yield _counts("dropped_messages", "Worker messages dropped, by reason.", "reason", dropped)
        failover = self._dispatcher.failover.counts
        yield _counts("failovers", "Failover events of requests whose worker was lost.", "event", failover)

    def _durable(self) -> Iterator[Metric]:
        told = self._told()
        answers = GaugeMetricFamily("roundhouse_durable_answers", "Answers that outlive their clients.")
        answers.add_metric([], told["answers"])
        yield answers
        queued = GaugeMetricFamily("roundhouse_background_queued", "Responses that wait in the background.")
        queued.add_metric([], told["queued"])
        yield queued
        about = "Durable answers: kept, joined by a retry, abandoned, evicted, refused."
        yield _counts("durable_answer_events", about, "event", told["counts"])
        if (journal := told["journal"]) is None:
            return
        up = GaugeMetricFamily("roundhouse_journal_up", "Whether the journal can be written.")
        up.add_metric([], float(not journal["problem"]))
        yield up
        size = GaugeMetricFamily("roundhouse_journal_bytes", "Bytes of the journal's entries.")
        size.add_metric([], journal["bytes"])
        yield size
        names = ("commits", "operations", "lost", "errors", "started_over")
        counts = {name: journal[name] for name in names}
        yield _counts(
            "journal_events", "Commits, operations, lost entries, errors, new starts.", "event", counts
        )

    def _adapters(self) -> Iterator[Metric]:
        adapters = {name: self._dispatcher.adapters.known(name) for name in self._dispatcher.fleet.models}
        count = _gauge("adapters", "Adapters that requests may use.")
        size = _gauge("adapter_bytes", "Memory of the adapters in each worker.")
        for name, infos in adapters.items():
            count.add_metric([name], len(infos))
            size.add_metric([name], sum(info.bytes for info in infos))
        yield from (count, size)

    def _traffic(self) -> Iterator[Metric]:
        models = self._dispatcher.traffic.models
        ends = CounterMetricFamily(
            "roundhouse_requests",
            "Requests finished, by task and end code.",
            labels=["model", "task", "code"],
        )
        for model, traffic in models.items():
            for (task, code), count in traffic.ends.items():
                ends.add_metric([model, task, code], count)
        yield ends
        yield _of_models("generation_tokens", "Tokens generated.", models, lambda t: t.tokens)
        yield _of_models("prompt_tokens", "Prompt tokens.", models, lambda t: t.prompt_tokens)
        yield _of_models(
            "cached_prompt_tokens",
            "Prompt tokens found in the prefix cache.",
            models,
            lambda t: t.cached_tokens,
        )
        yield _of_models(
            "prefix_cache_queries", "Prompts looked up in the prefix cache.", models, lambda t: t.prompts
        )
        yield _of_models(
            "prefix_cache_hits",
            "Prompts of which the prefix cache had at least a part.",
            models,
            lambda t: t.hits,
        )
        yield _of_models("steps", "Worker steps that produced tokens.", models, lambda t: t.steps)
        yield _of_models(
            "step_rows", "Requests in these steps, summed over the steps.", models, lambda t: t.pieces
        )
        yield _of_models(
            "request_resumes",
            "Times that a request was resumed on another worker.",
            models,
            lambda t: t.resumes,
        )
        yield _histogram(
            "time_to_first_token",
            "Time from the arrival of a request to its first token.",
            models,
            lambda t: t.first_token_s,
        )
        yield _histogram(
            "inter_token",
            "Time between two consecutive tokens of a request.",
            models,
            lambda t: t.inter_token_s,
        )
        yield _histogram(
            "request", "Time from the arrival of a request to its end.", models, lambda t: t.request_s
        )

    def _requests(self) -> Iterator[Metric]:
        running = _gauge("requests_running", "Requests running on workers.")
        waiting = _gauge("requests_waiting", "Requests waiting at the gateway or in a worker's queue.")
        starved = CounterMetricFamily(
            "roundhouse_requests_starved",
            "Requests that their worker found to make no progress.",
            labels=["model"],
        )
        by_model = self._by_model()
        for model in self._dispatcher.fleet.models:
            beats = [worker.beat for worker in by_model.get(model, ()) if worker.beat is not None]
            running.add_metric([model], sum(beat.running for beat in beats))
            queued = len(self._dispatcher.flights.waiting(model))
            waiting.add_metric([model], queued + sum(beat.waiting for beat in beats))
            starved.add_metric([model], sum(beat.starved for beat in beats))
        yield from (running, waiting, starved, *self._preparation(by_model))

    def _preparation(self, by_model: Mapping[str, list[Worker]]) -> Iterator[Metric]:
        waiting = _gauge("preparation_waiting", "Requests waiting to be rendered and tokenized.")
        oldest = _gauge("preparation_oldest_seconds", "Waiting time of the oldest of these requests.")
        started = _counter("preparation_started", "Requests that were rendered and tokenized.")
        waited = _counter("preparation_waited_seconds", "Seconds that these requests had waited before.")
        refused = _counter("preparation_refused", "Requests refused because too many were being tokenized.")
        for model, workers in by_model.items():
            told = [worker.beat.preparation for worker in workers if worker.beat and worker.beat.preparation]
            waiting.add_metric([model], sum(each.waiting for each in told))
            oldest.add_metric([model], max((each.oldest_s for each in told), default=0.0))
            started.add_metric([model], sum(each.started for each in told))
            waited.add_metric([model], sum(each.waited_s for each in told))
            refused.add_metric([model], sum(each.refused for each in told))
        yield from (waiting, oldest, started, waited, refused)

    def _workers(self) -> Iterator[Metric]:
        serving = _gauge("workers_serving", "Workers that accept requests.")
        restarts = CounterMetricFamily(
            "roundhouse_worker_restarts", "Unexpected exits of worker processes.", labels=["model"]
        )
        losses = CounterMetricFamily(
            "roundhouse_worker_losses", "Workers lost, by reason.", labels=["model", "reason"]
        )
        by_model, states = self._by_model(), self._dispatcher.catalogue.states
        for model in self._dispatcher.fleet.models:
            serving.add_metric([model], sum(worker.serves for worker in by_model.get(model, ())))
            if model in states:
                restarts.add_metric([model], states[model].restarts)
        for model, traffic in self._dispatcher.traffic.models.items():
            for reason, count in traffic.losses.items():
                losses.add_metric([model, reason], count)
        yield from (serving, restarts, losses, *self._memory(by_model))

    def _memory(self, by_model: Mapping[str, list[Worker]]) -> Iterator[Metric]:
        resident = _gauge("worker_resident_bytes", "Resident memory of the worker processes.")
        footprint = _gauge("worker_footprint_bytes", "Memory of the workers as the system counts it.")
        device = _gauge("worker_device_bytes", "Device memory of the workers' arrays.")
        cache = _gauge("worker_cache_bytes", "Memory of KV caches and stored prefixes.")
        for model, workers in by_model.items():
            told = [worker.beat.resources for worker in workers if worker.beat and worker.beat.resources]
            resident.add_metric([model], sum(each.resident_bytes for each in told))
            footprint.add_metric([model], sum(each.footprint_bytes for each in told))
            device.add_metric([model], sum(each.device_bytes for each in told))
            cache.add_metric([model], sum(worker.cache_bytes for worker in workers))
        yield from (resident, footprint, device, cache, *self._ranks(by_model))

    def _ranks(self, by_model: Mapping[str, list[Worker]]) -> Iterator[Metric]:
        resident = _gauge("rank_resident_bytes", "Resident memory of each rank except rank 0.", "rank")
        device = _gauge("rank_device_bytes", "Device memory of each rank except rank 0.", "rank")
        for model, workers in by_model.items():
            beats = [worker.beat.resources for worker in workers if worker.beat and worker.beat.resources]
            ranks = [rank for resources in beats for rank in resources.ranks]
            for number in sorted({rank.rank for rank in ranks}):
                told = [rank for rank in ranks if rank.rank == number]
                resident.add_metric([model, str(number)], sum(rank.resident_bytes for rank in told))
                device.add_metric([model, str(number)], sum(rank.device_bytes for rank in told))
        yield from (resident, device)

    def _prefixes(self) -> Iterator[Metric]:
        held = _gauge("prefix_cache_bytes", "Size of the prefix cache, by tier.", "tier")
        limits = _gauge("prefix_cache_limit_bytes", "Size limit of the prefix cache, by tier.", "tier")
        misses = CounterMetricFamily(
            "roundhouse_prefix_cache_misses", "Prefix cache misses, by reason.", labels=["model", "reason"]
        )
        timeouts = CounterMetricFamily(
            "roundhouse_prefix_cache_read_timeouts",
            "Requests that continued without their prefix because the disk read timed out.",
            labels=["model"],
        )
        for model, workers in self._by_model().items():
            told = [worker.beat.prefix for worker in workers if worker.beat and worker.beat.prefix]
            held.add_metric([model, "ram"], sum(each.ram_bytes for each in told))
            held.add_metric([model, "disk"], sum(each.disk_bytes for each in told))
            limits.add_metric([model, "ram"], sum(each.ram_limit for each in told))
            limits.add_metric([model, "disk"], sum(each.disk_limit for each in told))
            for reason, count in _bounded(_misses(told)).items():
                misses.add_metric([model, reason], count)
            timeouts.add_metric([model], sum(each.read_timeouts for each in told))
        yield from (held, limits, misses, timeouts)

    def _by_model(self) -> dict[str, list[Worker]]:
        found: dict[str, list[Worker]] = {}
        for worker in self._dispatcher.fleet:
            found.setdefault(worker.model, []).append(worker)
        return found


def _of_batches(told: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of batches. Those that are over are counted until they are deleted."""
    batches = GaugeMetricFamily("roundhouse_batches", "Stored batches by status.", labels=["status"])
    for status, count in told["statuses"].items():
        batches.add_metric([status], count)
    yield batches
    lines = GaugeMetricFamily(
        "roundhouse_batch_requests", "Requests of batches that are not over, by state.", labels=["state"]
    )
    for state, count in told["requests"].items():
        lines.add_metric([state], count)
    yield lines
    yield GaugeMetricFamily("roundhouse_batch_storage_bytes", "Files and results on disk.", told["bytes"])
    yield GaugeMetricFamily(
        "roundhouse_batches_waiting_for_disk", "1 if the folder cannot be used.", bool(told["problem"])
    )


def _misses(told: Iterable[PrefixStatus]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for each in told:
        sums.update(each.misses)
    return sums


def _bounded(counts: Mapping[str, int]) -> dict[str, int]:
    found = Counter(counts).most_common()
    rest = sum(count for _, count in found[REASONS_MAX:])
    return dict(found[:REASONS_MAX]) | ({"other": rest} if rest else {})


def _counter(name: str, about: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"roundhouse_{name}", about, labels=["model"])


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"roundhouse_{name}", about, labels=["model", *labels])


def _counts(name: str, about: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"roundhouse_{name}", about, labels=[label])
    for value, count in _bounded(counts).items():
        family.add_metric([value], count)
    return family


def _of_models(
    name: str, about: str, models: Mapping[str, ModelTraffic], value: Callable[[ModelTraffic], int]
) -> Metric:
    family = CounterMetricFamily(f"roundhouse_{name}", about, labels=["model"])
    for model, traffic in models.items():
        family.add_metric([model], value(traffic))
    return family


def _histogram(
    name: str, about: str, models: Mapping[str, ModelTraffic], value: Callable[[ModelTraffic], Histogram]
) -> Metric:
    family = HistogramMetricFamily(f"roundhouse_{name}_seconds", about, labels=["model"])
    for model, traffic in models.items():
        histogram = value(traffic)
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, histogram.cumulative(), strict=True))
        family.add_metric([model], buckets, histogram.sum)
    return family


async def metrics(request: Request) -> Response:
    """Return the metrics in the format that the scraper prefers."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    body: bytes = encode(registry(gateway_of(request)))
    return Response(body, headers={"content-type": content_type})


def registry(gateway: GatewayState) -> CollectorRegistry:
    """Return a registry with all metrics, including those of the gateway's process if the system provides
    them."""
    found = CollectorRegistry(auto_describe=False)
    durable = partial(durable_status, gateway)
    found.register(
        PrometheusExporter(
            gateway.dispatcher, gateway.http_counters, gateway.line_errors, durable, gateway.batches
        )
    )
    ProcessCollector(registry=found)
    return found


ROUTES = [Route(PATH, metrics)]
