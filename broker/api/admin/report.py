"""Status documents for operators: gateway, workers, prefix caches, requests and recent events. Pure.

They contain no text of requests. What is said of workers comes from their last heartbeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from msgspec.structs import asdict

from broker.dispatch.cache_clear import CacheClear
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import Fleet, Worker
from broker.dispatch.flight import Flight
from broker.dispatch.history import COLUMNS, SAMPLE_S, Sample
from broker.dispatch.traffic import (
    HttpCounters,
    Refusal,
    RequestEnd,
    Traffic,
    WorkerEvent,
    kind_of,
    phases_of,
)
from protocol.types import (
    Exactness,
    ExpertStatus,
    MemoryUsage,
    PrefixReuse,
    PrefixStatus,
    PreparationStatus,
    RankMemory,
    RequestStatus,
    SpecDecodeStatus,
)

_SUMS = (
    "ram_bytes",
    "ram_limit",
    "disk_bytes",
    "disk_limit",
    "blocks",
    "snapshots",
    "lookups",
    "hits",
    "prompt_tokens",
    "reused_tokens",
    "read_timeouts",
    "written_bytes",
)
_SHARED = ("writes_limit", "writes_left")
"""Figures of the write budget, which is one for all workers of a folder."""


REQUESTS_MAX = 256
"""Maximum number of requests listed, the oldest first."""


@cache
def version() -> str:
    return metadata.version("mlx-roundhouse")


# --- GET /v1/status ----------------------------------------------------------------------------------


def status(
    dispatcher: Dispatcher,
    http_counters: HttpCounters,
    line_errors: Mapping[str, int],
    moment: StatusSnapshot,
    started_at: float,
    media_bytes: int = 0,
    captured: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the gateway, every model, every connected worker, every request, and recent events.

    A model's `waiting` are assigned to no worker. `line_errors`: transport errors, counted. `media_bytes`:
    memory of images and videos. `captured`: ids of requests that can be inspected; None: no inspection.
    """
    return {
        "object": "status",
        "time": round(moment.wall, 3),
        "gateway": {
            "version": version(),
            "uptime_s": round(moment.now - started_at, 3),
            "in_flight": len(dispatcher.flights),
            "between_workers": len(dispatcher.flights.waiting()),
            "media_bytes": media_bytes,
            "memory_budget": dispatcher.catalogue.memory_budget,
            "stopping": dispatcher.stopping,
            "captured": captured,
            "continued_by": dict(dispatcher.failover.continued_by),
            **gateway_counts(dispatcher, http_counters, line_errors),
        },
        "models": [_model(dispatcher, name) for name in sorted(dispatcher.fleet.models)],
        "workers": [_worker(dispatcher, worker, moment) for worker in dispatcher.fleet],
        "requests": requests(dispatcher, moment),
        "recent": recent(dispatcher.traffic, http_counters.refusals, moment),
    }


def gateway_counts(
    dispatcher: Dispatcher, http_counters: HttpCounters, line_errors: Mapping[str, int]
) -> dict[str, Any]:
    """Return the gateway's counters, most of them by event, reason or code."""
    return {
        "failover": dict(dispatcher.failover.counts),
        "dropped": dict(dispatcher.dropped),
        "line_errors": dict(line_errors),
        "responses": {str(status): count for status, count in sorted(http_counters.statuses.items())},
        "errors": dict(http_counters.errors),
        "connections_turned_away": http_counters.connections_turned_away,
    }


def _model(dispatcher: Dispatcher, name: str) -> dict[str, Any]:
    configured = dispatcher.catalogue.states.get(name)
    traffic = dispatcher.traffic.of(name)
    return {
        "model": name,
        "aliases": list(configured.aliases) if configured else [],
        "state": dispatcher.catalogue.state(name),
        "resident": configured is not None and configured.resident,
        "on_demand": dispatcher.catalogue.is_on_demand(name),
        "pinned": dispatcher.catalogue.is_pinned(name),
        "weight_bytes": configured.weight_bytes if configured else None,
        "memory_bytes": configured.memory_bytes if configured else 0,
        "waiting": len(dispatcher.flights.waiting(name)),
        "replicas": configured.replicas if configured else None,
        "restarts": configured.restarts if configured else None,
        "failure": configured.failure if configured else "",
        "last_end": configured.last_end if configured else "",
        "last_end_reason": configured.last_end_reason if configured else "",
        "losses": dict(traffic.losses),
        "answered_tokens": traffic.tokens,
        "adapters": _adapters(dispatcher, name),
    }


def _adapters(dispatcher: Dispatcher, name: str) -> list[dict[str, Any]]:
    """Return a model's adapters, also removed ones that requests still use. Never their folders."""
    known, leaving = dispatcher.adapters.known(name), dispatcher.adapters.leaving(name)
    return [
        {"name": info.name, "rank": info.rank, "bytes": info.bytes, "leaving": info in leaving}
        for info in (*known, *leaving)
    ]


def _worker(dispatcher: Dispatcher, worker: Worker, moment: StatusSnapshot) -> dict[str, Any]:
    beat, ready = worker.beat, worker.ready
    resources = beat.resources if beat else None
    return {
        "model": worker.model,
        "state": worker.state,
        "incarnation": worker.incarnation,
        "pid": worker.pid,
        "host": worker.host,
        "connected_s": round(moment.now - worker.connected_at, 3),
        "uptime_s": round(resources.uptime_s, 3) if resources else None,
        "loading": _loading(worker),
        "context_length": ready.context_length if ready else None,
        "running_max": ready.running_max if ready else None,
        "parameters": ready.parameters if ready else None,
        "memory": _memory(resources) if resources else None,
        "ranks": [_rank(rank) for rank in resources.ranks] if resources else [],
        "running": beat.running if beat else 0,
        "waiting": beat.waiting if beat else 0,
        "dispatched": worker.dispatched,
        "assigned": len(dispatcher.flights.assigned(worker.incarnation)),
        "speed": {
            "prompt_tokens_per_s": _rounded(worker.throughput.prompt),
            "answer_tokens_per_s": _rounded(worker.throughput.answer),
        },
        "steps": beat.steps if beat else 0,
        "starved": beat.starved if beat else 0,
        "cache_bytes": beat.cache_bytes if beat else 0,
        "cache_bytes_max": dispatcher.catalogue.cache_bytes_max(worker),
        "tokens_max": ready.tokens_max if ready else 0,
        "start_s": ready.start_s if ready else {},
        "experts": _experts(resources.experts) if resources and resources.experts else None,
        "exactness": _exactness(ready.exactness) if ready and ready.exactness else None,
        "plan": worker.plan,
        "stands_in": worker.stands_in,
        "prefix": _summary([beat.prefix]) if beat and beat.prefix else None,
        "images": asdict(beat.images) if beat and beat.images else None,
        "drafts": _drafts(beat.drafts) if beat and beat.drafts else None,
        "pressure": asdict(beat.pressure) if beat and beat.pressure else None,
        "preparation": _preparation(beat.preparation) if beat and beat.preparation else None,
        "rows": [_row(row) for row in beat.rows] if beat else [],
    }


def _exactness(exactness: Exactness) -> dict[str, Any]:
    """Return the checks that found a difference, and the limits of `--exact`."""
    return {
        "checked": len(exactness.checks),
        "is_complete": exactness.is_complete,
        "differences": [asdict(check) for check in exactness.checks if not check.is_exact],
        "rows_max": exactness.rows_max,
        "draft_tokens_max": exactness.draft_tokens_max,
        "chip": exactness.chip,
    }


def _experts(status: ExpertStatus) -> dict[str, Any]:
    hit_rate = _share(status.wanted - status.read, status.wanted)
    return asdict(status) | {"read_s": round(status.read_s, 3), "hit_rate": hit_rate}


def _drafts(drafts: SpecDecodeStatus) -> dict[str, Any]:
    sources = {name: asdict(http_counters) for name, http_counters in drafts.sources.items()}
    return asdict(drafts) | {"sources": sources}


def _preparation(status: PreparationStatus) -> dict[str, Any]:
    times = {name: round(getattr(status, name), 3) for name in ("oldest_s", "waited_s")}
    return asdict(status) | times


def _rounded(speed: float | None) -> float | None:
    return None if speed is None else round(speed, 1)


def _loading(worker: Worker) -> dict[str, int] | None:
    """Return the loading progress in bytes of weights; None once they are loaded."""
    if worker.ready is not None:
        return None
    done, total = worker.loading or (0, 0)
    return {"done": done, "total": total}


def _rank(rank: RankMemory) -> dict[str, Any]:
    """Describe one rank except rank 0, which is the worker's own process."""
    return {"rank": rank.rank, "host": rank.host, "memory": _memory(rank)}


def _memory(resources: MemoryUsage) -> dict[str, int]:
    """Return the process's memory and the device memory of its arrays."""
    return {
        "resident_bytes": resources.resident_bytes,
        "device_bytes": resources.device_bytes,
        "device_peak_bytes": resources.device_peak_bytes,
        "device_spare_bytes": resources.device_spare_bytes,
        "footprint_bytes": resources.footprint_bytes,
    }


def _row(row: RequestStatus) -> dict[str, Any]:
    return {
        "id": row.id,
        "phase": row.phase,
        "prompt_tokens": row.prompt_tokens,
        "prefilled": row.prefilled,
        "answered": row.answered,
        "seconds": row.seconds,
        "time_to_first_token_s": row.first_token_s,
        "tokens_per_s": _row_tokens_per_s(row),
        "reuse": reuse_of(row.reuse),
        "preemptions": row.preemptions,
    }


def _row_tokens_per_s(row: RequestStatus) -> float | None:
    """Return the decode speed after the first token; None while it is unknown."""
    if row.first_token_s is None or row.answered < 2 or row.seconds <= row.first_token_s:
        return None
    return round((row.answered - 1) / (row.seconds - row.first_token_s), 3)


# --- GET /v1/cache -----------------------------------------------------------------------------------


def caches(fleet: Fleet) -> dict[str, Any]:
    """Return the prefix cache of each connected model, summed over its workers."""
    stored: dict[str, list[PrefixStatus]] = {}
    for worker in fleet:
        of_model = stored.setdefault(worker.model, [])
        if worker.beat and worker.beat.prefix:
            of_model.append(worker.beat.prefix)
    return {"object": "list", "data": [_cache(model, stored[model]) for model in sorted(stored)]}


def _cache(model: str, statuses: Sequence[PrefixStatus]) -> dict[str, Any]:
    return {"model": model, "enabled": bool(statuses), **_summary(statuses)}


def _summary(statuses: Sequence[PrefixStatus]) -> dict[str, Any]:
    sums = {name: sum(getattr(status, name) for status in statuses) for name in _SUMS}
    shared = {name: max((getattr(status, name) for status in statuses), default=0) for name in _SHARED}
    misses: Counter[str] = Counter()
    for status in statuses:
        misses.update(status.misses)
    return {
        **sums,
        **shared,
        "hit_rate": _share(sums["hits"], sums["lookups"]),
        "token_hit_rate": _share(sums["reused_tokens"], sums["prompt_tokens"]),
        "misses": dict(misses.most_common()),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


# --- DELETE /v1/cache --------------------------------------------------------------------------------


def freed(cache_clear: CacheClear) -> dict[str, Any]:
    """Return the bytes that a cache clear freed, by model."""
    given: dict[str, Counter[str]] = {}
    for model, message in cache_clear.freed:
        sums = given.setdefault(model, Counter())
        sums.update(ram_bytes=message.ram_bytes, disk_bytes=message.disk_bytes)
    return {"object": "list", "data": [{"model": model, **given[model]} for model in sorted(given)]}


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """One moment on two clocks: `now` on the gateway's monotonic clock, `wall` in Unix time."""

    now: float
    wall: float

    def unix(self, at: float) -> float:
        """Convert a monotonic time to Unix time."""
        return round(self.wall - (self.now - at), 3)


# --- requests in flight ------------------------------------------------------------------------------


def requests(dispatcher: Dispatcher, moment: StatusSnapshot) -> list[dict[str, Any]]:
    """Return the status of each request in flight."""
    beats = [worker.beat for worker in dispatcher.fleet if worker.beat is not None]
    rows = {row.id: row for beat in beats for row in beat.rows}
    flights = [flight for flight in dispatcher.flights if flight.terminal is None]
    return [_request(flight, rows, moment) for flight in flights[:REQUESTS_MAX]]


def _request(flight: Flight, rows: dict[str, RequestStatus], moment: StatusSnapshot) -> dict[str, Any]:
    attempt = flight.attempt
    row = rows.get(attempt.id) if attempt else None
    first_s = None if flight.started_at is None else round(flight.started_at - flight.opened_at, 4)
    return {
        "id": flight.id,
        "time": moment.unix(flight.opened_at),
        "key": flight.key,
        "model": flight.model,
        "adapter": flight.adapter,
        "task": kind_of(flight),
        "worker": attempt.worker if attempt else None,
        "phase": _phase(flight, row),
        "seconds": round(moment.now - flight.opened_at, 3),
        "prompt_tokens": flight.prompt_tokens,
        "prefilled": _prefilled(flight, row),
        "answered": flight.progress,
        "time_to_first_token_s": first_s,
        "tokens_per_s": _tokens_per_s(flight, moment),
        "reuse": reuse_of(flight.reuse),
        "preemptions": row.preemptions if row else 0,
        "resumes": max(0, flight.attempts - 1),
        "phases": phases_of(flight),
    }


def _phase(flight: Flight, row: RequestStatus | None) -> str:
    """Return the phase that the worker reports, or else `queued` (no worker), `preparing` or `waiting`.

    Heartbeats lag: a flight with output is in `decode`.
    """
    if flight.attempt is None:
        return "queued"
    if flight.attempt.deltas:
        return "decode"
    if row is not None:
        return row.phase
    return "waiting" if flight.attempt.accepted else "preparing"


def _prefilled(flight: Flight, row: RequestStatus | None) -> int:
    if flight.attempt is not None and flight.attempt.deltas:
        return flight.prompt_tokens
    return row.prefilled if row else 0


def _tokens_per_s(flight: Flight, moment: StatusSnapshot) -> float | None:
    """Return the decode speed after the first token; None while it is unknown."""
    if flight.started_at is None or len(flight.tokens) < 2 or moment.now <= flight.started_at:
        return None
    return round((len(flight.tokens) - 1) / (moment.now - flight.started_at), 3)


# --- recent events -----------------------------------------------------------------------------------


def recent(traffic: Traffic, refusals: Iterable[Refusal], moment: StatusSnapshot) -> dict[str, Any]:
    """Return recent events, the latest first."""
    return {
        "ends": [_end(end, moment) for end in reversed(traffic.ends)],
        "failures": [_end(end, moment) for end in reversed(traffic.failures)],
        "refusals": [_refusal(refusal, moment) for refusal in reversed(list(refusals))],
        "workers": [_worker_event(event, moment) for event in reversed(traffic.worker_events)],
    }


def _end(end: RequestEnd, moment: StatusSnapshot) -> dict[str, Any]:
    return {
        "time": moment.unix(end.at),
        "id": end.id,
        "model": end.model,
        "task": end.task,
        "code": end.code,
        "prompt_tokens": end.prompt_tokens,
        "cached_tokens": end.cached_tokens,
        "answered": end.answered,
        "time_to_first_token_s": None if end.first_token_s is None else round(end.first_token_s, 4),
        "seconds": round(end.seconds, 3),
        "resumes": end.resumes,
        "key": end.key,
        "phases": end.phases,
    }


def _refusal(refusal: Refusal, moment: StatusSnapshot) -> dict[str, Any]:
    return {
        "time": moment.unix(refusal.at),
        "request_id": refusal.id,
        "method": refusal.method,
        "path": refusal.path,
        "status": refusal.status,
        "code": refusal.code,
    }


def _worker_event(event: WorkerEvent, moment: StatusSnapshot) -> dict[str, Any]:
    return {
        "time": moment.unix(event.at),
        "model": event.model,
        "incarnation": event.incarnation,
        "pid": event.pid,
        "what": event.what,
    }


# --- history -----------------------------------------------------------------------------------------


def history(samples: Iterable[Sample], moment: StatusSnapshot) -> dict[str, Any]:
    """Return the samples as `rows`, the oldest first, each with one value per entry of `columns`."""
    rows = [[moment.unix(sample.at), *(getattr(sample, name) for name in COLUMNS[1:])] for sample in samples]
    return {"every_s": SAMPLE_S, "columns": ["time", *COLUMNS[1:]], "rows": rows}


def reuse_of(reuse: PrefixReuse | None) -> dict[str, Any] | None:
    """Return the cached tokens of a prompt, and those that sparse prefill skipped."""
    if reuse is None:
        return None
    document: dict[str, Any] = {"tokens": reuse.tokens, "tier": reuse.tier, "miss": reuse.miss}
    if reuse.message is not None:
        document |= {"message": reuse.message, "role": reuse.role}
    return document | {"sparse_tokens": reuse.sparse_tokens} if reuse.left_out else document
