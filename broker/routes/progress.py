"""Request status for operators: current requests, recent ends and a history of samples, without any text.

Pure; the clock is injected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.flight import Flight
from broker.dispatch.history import COLUMNS, SAMPLE_S, Sample
from broker.dispatch.http_counters import Refusal
from broker.dispatch.traffic import RequestEnd, Traffic, WorkerEvent, kind_of
from protocol.types import PrefixReuse, RequestStatus

REQUESTS_MAX = 256
"""Maximum number of requests listed, the oldest first."""


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
        "model": flight.model,
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
    told: dict[str, Any] = {"tokens": reuse.tokens, "tier": reuse.tier, "miss": reuse.miss}
    return told | {"sparse_tokens": reuse.sparse_tokens} if reuse.left_out else told
