"""What operators are told of the gateway, its workers and their prefix caches. No text of anybody's. Pure.

All of it but the clock is what workers said in their last heartbeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from msgspec.structs import asdict

from broker.dispatch.clearing import Clearing
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import Fleet, Worker
from protocol.parts import PrefixStatus, RowStatus

TOP_PREFIXES_MAX = 16

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
)


@cache
def version() -> str:
    return metadata.version("mlx-roundhouse")


# --- GET /v1/status ----------------------------------------------------------------------------------


def status(dispatcher: Dispatcher, uptime_s: float, line_errors: Mapping[str, int]) -> dict[str, Any]:
    """The gateway, every model, and every worker that is connected, with its requests. A model's `waiting`
    are aboard no worker.

    `line_errors`: what went wrong on the line, counted.
    """
    return {
        "object": "status",
        "gateway": {
            "version": version(),
            "uptime_s": round(uptime_s, 3),
            "in_flight": len(dispatcher.flights),
            "between_workers": len(dispatcher.flights.waiting()),
            "stopping": dispatcher.stopping,
            "failover": dict(dispatcher.failover.counts),
            "dropped": dict(dispatcher.dropped),
            "line_errors": dict(line_errors),
        },
        "models": [_model(dispatcher, name) for name in sorted(dispatcher.fleet.models)],
        "workers": [_worker(worker) for worker in dispatcher.fleet],
    }


def _model(dispatcher: Dispatcher, name: str) -> dict[str, Any]:
    configured = dispatcher.catalogue.states.get(name)
    return {
        "model": name,
        "state": dispatcher.catalogue.state(name),
        "resident": configured is not None and configured.resident,
        "memory_bytes": configured.memory_bytes if configured else 0,
        "waiting": len(dispatcher.flights.waiting(name)),
    }


def _worker(worker: Worker) -> dict[str, Any]:
    beat, ready = worker.beat, worker.ready
    return {
        "model": worker.model,
        "state": worker.state,
        "incarnation": worker.incarnation,
        "pid": worker.pid,
        "running": beat.running if beat else 0,
        "waiting": beat.waiting if beat else 0,
        "steps": beat.steps if beat else 0,
        "cache_bytes": beat.cache_bytes if beat else 0,
        "cache_bytes_max": ready.cache_bytes_max if ready else None,
        "tokens_max": ready.tokens_max if ready else 0,
        "start_s": ready.start_s if ready else {},
        "prefix": _summary([beat.prefix]) if beat and beat.prefix else None,
        "images": asdict(beat.images) if beat and beat.images else None,
        "rows": [_row(row) for row in beat.rows] if beat else [],
    }


def _row(row: RowStatus) -> dict[str, Any]:
    return {
        "id": row.id,
        "phase": row.phase,
        "prompt_tokens": row.prompt_tokens,
        "prefilled": row.prefilled,
        "answered": row.answered,
        "seconds": row.seconds,
        "time_to_first_token_s": row.first_token_s,
        "tokens_per_s": _tokens_per_s(row),
        "reuse": asdict(row.reuse) if row.reuse else None,
    }


def _tokens_per_s(row: RowStatus) -> float | None:
    """Of the tokens behind the first; None while there is no telling."""
    if row.first_token_s is None or row.answered < 2 or row.seconds <= row.first_token_s:
        return None
    return round((row.answered - 1) / (row.seconds - row.first_token_s), 3)


# --- GET /v1/cache -----------------------------------------------------------------------------------


def caches(fleet: Fleet) -> dict[str, Any]:
    """The prefix cache of each model that is connected, its workers taken together."""
    stored: dict[str, list[PrefixStatus]] = {}
    for worker in fleet:
        of_model = stored.setdefault(worker.model, [])
        if worker.beat and worker.beat.prefix:
            of_model.append(worker.beat.prefix)
    return {"object": "list", "data": [_cache(model, stored[model]) for model in sorted(stored)]}


def _cache(model: str, statuses: Sequence[PrefixStatus]) -> dict[str, Any]:
    top = sorted((prefix for status in statuses for prefix in status.top), key=lambda p: -p.uses)
    listed = [asdict(prefix) for prefix in top[:TOP_PREFIXES_MAX]]
    return {"model": model, "enabled": bool(statuses), **_summary(statuses), "top": listed}


def _summary(statuses: Sequence[PrefixStatus]) -> dict[str, Any]:
    sums = {name: sum(getattr(status, name) for status in statuses) for name in _SUMS}
    misses: Counter[str] = Counter()
    for status in statuses:
        misses.update(status.misses)
    return {
        **sums,
        "hit_rate": _share(sums["hits"], sums["lookups"]),
        "token_hit_rate": _share(sums["reused_tokens"], sums["prompt_tokens"]),
        "misses": dict(misses.most_common()),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


# --- DELETE /v1/cache --------------------------------------------------------------------------------


def freed(clearing: Clearing) -> dict[str, Any]:
    """What a clearing gave back, by model."""
    given: dict[str, Counter[str]] = {}
    for model, message in clearing.freed:
        sums = given.setdefault(model, Counter())
        sums.update(ram_bytes=message.ram_bytes, disk_bytes=message.disk_bytes)
    return {"object": "list", "data": [{"model": model, **given[model]} for model in sorted(given)]}
