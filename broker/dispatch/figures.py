"""Figures for operators: what is counted and measured, each defined in one place. Pure.

`/metrics` shows all of them (`api.admin.status_routes`), the charts are made of the totals of some
(`dispatch.history`), and those of the gateway are read from its part of the status document
(`api.admin.report`).

Labels are bounded: models that the fleet knows, and codes and reasons of fixed tables; of names that a worker
sends, `/metrics` shows the most frequent. Ids are never labels.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from broker.dispatch.adapters import AdapterCatalogue
from broker.dispatch.catalogue import Catalogue
from broker.dispatch.fleet import Fleet, Worker
from broker.dispatch.flights import Flights
from broker.dispatch.traffic import Histogram, ModelTraffic, Traffic
from protocol.messages import Heartbeat
from protocol.types import AdapterInfo, PrefixStatus, PreparationStatus, RankMemory, Resources

Source = TypeVar("Source")
Value = float | Mapping[Any, float] | Histogram | None
"""One number; numbers by label values, or tuples of them; a histogram; or None, if there is none."""


@dataclass(frozen=True, slots=True)
class Figure(Generic[Source]):
    """A figure of the gateway or of a model."""

    name: str
    """That of its metric, without prefix and suffix."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    value: Callable[[Source], Value]
    labels: tuple[str, ...] = ()
    """Of the keys, if the value is a mapping."""


# --- the gateway: read from its counts, `durable` and `batches` in the status document ----------------

_JOURNAL_EVENTS = ("commits", "operations", "lost", "errors", "started_over")


def _journal(status: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Value]) -> Value:
    journal = status["durable"]["journal"]
    return None if journal is None else read(journal)


def _batches(status: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Value]) -> Value:
    return None if status["batches"] is None else read(status["batches"])


GATEWAY_FIGURES: tuple[Figure[Mapping[str, Any]], ...] = (
    Figure("http_responses", "counter", "HTTP responses by status code.",
           lambda s: s["responses"], ("code",)),
    Figure("errors", "counter", "HTTP error responses by error code.", lambda s: s["errors"], ("code",)),
    Figure("connections_turned_away", "counter", "Client connections beyond the limit.",
           lambda s: s["connections_turned_away"]),
    Figure("line_errors", "counter", "Errors of the transport to the workers, by reason.",
           lambda s: s["line_errors"], ("reason",)),
    Figure("dropped_messages", "counter", "Worker messages dropped, by reason.",
           lambda s: s["dropped"], ("reason",)),
    Figure("failovers", "counter", "Failover events of requests whose worker was lost.",
           lambda s: s["failover"], ("event",)),
    Figure("durable_answers", "gauge", "Answers that outlive their clients.",
           lambda s: s["durable"]["answers"]),
    Figure("background_queued", "gauge", "Responses that wait in the background.",
           lambda s: s["durable"]["queued"]),
    Figure("durable_answer_events", "counter",
           "Durable answers: kept, joined by a retry, abandoned, evicted, refused.",
           lambda s: s["durable"]["counts"], ("event",)),
    Figure("journal_up", "gauge", "Whether the journal can be written.",
           lambda s: _journal(s, lambda j: float(not j["problem"]))),
    Figure("journal_bytes", "gauge", "Bytes of the journal's entries.",
           lambda s: _journal(s, lambda j: j["bytes"])),
    Figure("journal_events", "counter", "Commits, operations, lost entries, errors, new starts.",
           lambda s: _journal(s, lambda j: {name: j[name] for name in _JOURNAL_EVENTS}), ("event",)),
    Figure("batches", "gauge", "Stored batches by status.",
           lambda s: _batches(s, lambda b: b["statuses"]), ("status",)),
    Figure("batch_requests", "gauge", "Requests of batches that are not over, by state.",
           lambda s: _batches(s, lambda b: b["requests"]), ("state",)),
    Figure("batch_storage_bytes", "gauge", "Files and results on disk.",
           lambda s: _batches(s, lambda b: b["bytes"])),
    Figure("batches_waiting_for_disk", "gauge", "1 if the folder cannot be used.",
           lambda s: _batches(s, lambda b: bool(b["problem"]))),
)  # fmt: skip
"""Figures without a model. `api.admin.status_routes` gives them their source: the counts that
`api.admin.report.gateway_counts` returns, `durable` and `batches`."""


# --- each model --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """What the figures of one model are read from. Workers report theirs in heartbeats."""

    name: str
    traffic: ModelTraffic
    workers: Sequence[Worker] = ()
    queued: int = 0
    """Requests that no worker has."""
    restarts: int | None = None
    """None: the supervisor does not run it."""
    adapters: Sequence[AdapterInfo] = ()

    @property
    def beats(self) -> list[Heartbeat]:
        return [worker.beat for worker in self.workers if worker.beat]

    @property
    def resources(self) -> list[Resources]:
        return [beat.resources for beat in self.beats if beat.resources]

    @property
    def prefixes(self) -> list[PrefixStatus]:
        return [beat.prefix for beat in self.beats if beat.prefix]

    @property
    def preparations(self) -> list[PreparationStatus]:
        return [beat.preparation for beat in self.beats if beat.preparation]

    def of_workers(self, values: Iterable[float]) -> float | None:
        """Return the sum; None if no worker is connected."""
        return sum(values) if self.workers else None

    def of_ranks(self, read: Callable[[RankMemory], int]) -> dict[str, float]:
        """Return a sum for each rank."""
        sums: Counter[int] = Counter()
        for resources in self.resources:
            for rank in resources.ranks:
                sums[rank.rank] += read(rank)
        return {str(rank): sums[rank] for rank in sorted(sums)}

    def of_tiers(self, ram: Callable[[PrefixStatus], int], disk: Callable[[PrefixStatus], int]) -> Value:
        if not self.workers:
            return None
        return {"ram": sum(map(ram, self.prefixes)), "disk": sum(map(disk, self.prefixes))}


def _misses(model: ModelSnapshot) -> Counter[str]:
    sums: Counter[str] = Counter()
    for prefix in model.prefixes:
        sums.update(prefix.misses)
    return sums


def _level(beat: Heartbeat) -> int:
    level = beat.pressure.level if beat.pressure else ""
    return _LEVELS.index(level) if level in _LEVELS else 0


_LEVELS = ("none", "warning", "critical")

MODEL_FIGURES: tuple[Figure[ModelSnapshot], ...] = (
    # Counted as messages and requests pass the gateway
    Figure("requests", "counter", "Requests finished, by task and end code.",
           lambda m: m.traffic.ends, ("task", "code")),
    Figure("generation_tokens", "counter", "Tokens generated.", lambda m: m.traffic.tokens),
    Figure("prompt_tokens", "counter", "Prompt tokens.", lambda m: m.traffic.prompt_tokens),
    Figure("cached_prompt_tokens", "counter", "Prompt tokens found in the prefix cache.",
           lambda m: m.traffic.cached_tokens),
    Figure("prefix_cache_queries", "counter", "Prompts looked up in the prefix cache.",
           lambda m: m.traffic.prompts),
    Figure("prefix_cache_hits", "counter", "Prompts of which the prefix cache had at least a part.",
           lambda m: m.traffic.hits),
    Figure("steps", "counter", "Worker steps that produced tokens.", lambda m: m.traffic.steps),
    Figure("step_rows", "counter", "Requests in these steps, summed over the steps.",
           lambda m: m.traffic.pieces),
    Figure("request_resumes", "counter", "Times that a request was resumed on another worker.",
           lambda m: m.traffic.resumes),
    Figure("time_to_first_token", "histogram", "Time from the arrival of a request to its first token.",
           lambda m: m.traffic.first_token_s),
    Figure("inter_token", "histogram", "Time between two consecutive tokens of a request.",
           lambda m: m.traffic.inter_token_s),
    Figure("request", "histogram", "Time from the arrival of a request to its end.",
           lambda m: m.traffic.request_s),
    Figure("worker_losses", "counter", "Workers lost, by reason.", lambda m: m.traffic.losses, ("reason",)),
    # Requests and workers now
    Figure("requests_running", "gauge", "Requests running on workers.",
           lambda m: sum(beat.running for beat in m.beats)),
    Figure("requests_waiting", "gauge", "Requests waiting at the gateway or in a worker's queue.",
           lambda m: m.queued + sum(beat.waiting for beat in m.beats)),
    Figure("requests_starved", "counter", "Requests that their worker found to make no progress.",
           lambda m: sum(beat.starved for beat in m.beats)),
    Figure("workers_serving", "gauge", "Workers that accept requests.",
           lambda m: sum(worker.serves for worker in m.workers)),
    Figure("worker_restarts", "counter", "Unexpected exits of worker processes.", lambda m: m.restarts),
    Figure("adapters", "gauge", "Adapters that requests may use.", lambda m: len(m.adapters)),
    Figure("adapter_bytes", "gauge", "Memory of the adapters in each worker.",
           lambda m: sum(info.bytes for info in m.adapters)),
    # Preparation of prompts
    Figure("preparation_waiting", "gauge", "Requests waiting to be rendered and tokenized.",
           lambda m: m.of_workers(each.waiting for each in m.preparations)),
    Figure("preparation_oldest_seconds", "gauge", "Waiting time of the oldest of these requests.",
           lambda m: max((each.oldest_s for each in m.preparations), default=m.of_workers(()))),
    Figure("preparation_started", "counter", "Requests that were rendered and tokenized.",
           lambda m: m.of_workers(each.started for each in m.preparations)),
    Figure("preparation_waited_seconds", "counter", "Seconds that these requests had waited before.",
           lambda m: m.of_workers(each.waited_s for each in m.preparations)),
    Figure("preparation_refused", "counter", "Requests refused because too many were being tokenized.",
           lambda m: m.of_workers(each.refused for each in m.preparations)),
    # Memory
    Figure("worker_resident_bytes", "gauge", "Resident memory of the worker processes.",
           lambda m: m.of_workers(each.resident_bytes for each in m.resources)),
    Figure("worker_footprint_bytes", "gauge", "Memory of the workers as the system counts it.",
           lambda m: m.of_workers(each.footprint_bytes for each in m.resources)),
    Figure("worker_device_bytes", "gauge", "Device memory of the workers' arrays.",
           lambda m: m.of_workers(each.device_bytes for each in m.resources)),
    Figure("worker_cache_bytes", "gauge", "Memory of KV caches and stored prefixes.",
           lambda m: m.of_workers(worker.cache_bytes for worker in m.workers)),
    Figure("memory_pressure", "gauge", "Memory pressure of the machine: 0 none, 1 warning, 2 critical.",
           lambda m: max(map(_level, m.beats), default=None)),
    Figure("rank_resident_bytes", "gauge", "Resident memory of each rank except rank 0.",
           lambda m: m.of_ranks(lambda rank: rank.resident_bytes), ("rank",)),
    Figure("rank_device_bytes", "gauge", "Device memory of each rank except rank 0.",
           lambda m: m.of_ranks(lambda rank: rank.device_bytes), ("rank",)),
    # Prefix caches
    Figure("prefix_cache_bytes", "gauge", "Size of the prefix cache, by tier.",
           lambda m: m.of_tiers(lambda p: p.ram_bytes, lambda p: p.disk_bytes), ("tier",)),
    Figure("prefix_cache_limit_bytes", "gauge", "Size limit of the prefix cache, by tier.",
           lambda m: m.of_tiers(lambda p: p.ram_limit, lambda p: p.disk_limit), ("tier",)),
    Figure("prefix_cache_misses", "counter", "Prefix cache misses, by reason.", _misses, ("reason",)),
    Figure("prefix_cache_read_timeouts", "counter",
           "Requests that continued without their prefix because the disk read timed out.",
           lambda m: m.of_workers(each.read_timeouts for each in m.prefixes)),
    Figure("prefix_cache_written_bytes", "counter", "Bytes of prefixes written to the disk.",
           lambda m: m.of_workers(each.written_bytes for each in m.prefixes)),
    Figure("prefix_cache_writes_left_bytes", "gauge", "Bytes of prefixes that may be written at this moment.",
           lambda m: max((each.writes_left for each in m.prefixes), default=m.of_workers(()))),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Where the figures of the models come from."""

    fleet: Fleet
    flights: Flights
    traffic: Traffic
    catalogue: Catalogue
    adapters: AdapterCatalogue

    def snapshots(self) -> list[ModelSnapshot]:
        """Return all models that the gateway has known."""
        return [self.snapshot(name) for name in dict.fromkeys((*self.fleet.models, *self.traffic.models))]

    def snapshot(self, name: str) -> ModelSnapshot:
        configured = self.catalogue.states.get(name)
        return ModelSnapshot(
            name=name,
            traffic=self.traffic.models.get(name) or ModelTraffic(),
            workers=[worker for worker in self.fleet if worker.model == name],
            queued=len(self.flights.waiting(name)),
            restarts=configured.restarts if configured else None,
            adapters=self.adapters.known(name),
        )

    def totals(self) -> Mapping[str, float]:
        """Return each figure that is one number, and sum and count of histograms, summed over the models."""
        sums: defaultdict[str, float] = defaultdict(int)
        for model in self.snapshots():
            for figure in MODEL_FIGURES:
                value = None if figure.labels else figure.value(model)
                if isinstance(value, Histogram):
                    sums[f"{figure.name}_sum"] += value.sum
                    sums[f"{figure.name}_count"] += value.count
                elif isinstance(value, int | float):
                    sums[figure.name] += value
        return sums
