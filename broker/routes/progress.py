"""What operators are told of requests: where each stands, what has become of the last ones, and the last
minutes in numbers. No text of anybody's. Pure, the clock handed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.flight import Flight
from broker.dispatch.history import COLUMNS, SAMPLE_S, Sample
from broker.dispatch.tally import Refusal
from broker.dispatch.traffic import End, Traffic, WorkerEvent, kind_of
from protocol.parts import Reuse, RowStatus

REQUESTS_MAX = 256
"""So many are told of, those first that came first."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The same moment on two clocks: `now` is what the gateway's times are told by, `wall` the world's."""

    now: float
    wall: float

    def unix(self, at: float) -> float:
        """When something was, for others."""
        return round(self.wall - (self.now - at), 3)


# --- requests in the air -----------------------------------------------------------------------------


def requests(dispatcher: Dispatcher, moment: Moment) -> list[dict[str, Any]]:
    """Where each request stands."""
    beats = [worker.beat for worker in dispatcher.fleet if worker.beat is not None]
    rows = {row.id: row for beat in beats for row in beat.rows}
    flights = [flight for flight in dispatcher.flights if flight.terminal is None]
    return [_request(flight, rows, moment) for flight in flights[:REQUESTS_MAX]]


def _request(flight: Flight, rows: dict[str, RowStatus], moment: Moment) -> dict[str, Any]:
    leg = flight.leg
    row = rows.get(leg.id) if leg else None
    first_s = None if flight.started_at is None else round(flight.started_at - flight.opened_at, 4)
    return {
        "id": flight.id,
        "model": flight.model,
        "task": kind_of(flight),
        "worker": leg.worker if leg else None,
        "phase": _phase(flight, row),
        "seconds": round(moment.now - flight.opened_at, 3),
        "prompt_tokens": flight.prompt_tokens,
        "prefilled": _prefilled(flight, row),
        "answered": flight.progress,
        "time_to_first_token_s": first_s,
        "tokens_per_s": _tokens_per_s(flight, moment),
        "reuse": reuse_of(flight.reuse),
        "preemptions": row.preemptions if row else 0,
        "resumes": max(0, flight.legs - 1),
    }


def _phase(flight: Flight, row: RowStatus | None) -> str:
    """As its worker has it, or else `queued` (no worker has it), `preparing` or `waiting`. A worker's word is
    late: what has answered decodes."""
    if flight.leg is None:
        return "queued"
    if flight.leg.deltas:
        return "decode"
    if row is not None:
        return row.phase
    return "waiting" if flight.leg.accepted else "preparing"


def _prefilled(flight: Flight, row: RowStatus | None) -> int:
    if flight.leg is not None and flight.leg.deltas:
        return flight.prompt_tokens
    return row.prefilled if row else 0


def _tokens_per_s(flight: Flight, moment: Moment) -> float | None:
    """Of the tokens behind the first; None while there is no telling."""
    if flight.started_at is None or len(flight.tokens) < 2 or moment.now <= flight.started_at:
        return None
    return round((len(flight.tokens) - 1) / (moment.now - flight.started_at), 3)


# --- the last ones -----------------------------------------------------------------------------------


def recent(traffic: Traffic, refusals: Iterable[Refusal], moment: Moment) -> dict[str, Any]:
    """What happened lately, the latest first."""
    return {
        "ends": [_end(end, moment) for end in reversed(traffic.ends)],
        "failures": [_end(end, moment) for end in reversed(traffic.failures)],
        "refusals": [_refusal(refusal, moment) for refusal in reversed(list(refusals))],
        "workers": [_worker_event(event, moment) for event in reversed(traffic.worker_events)],
    }


def _end(end: End, moment: Moment) -> dict[str, Any]:
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


def _refusal(refusal: Refusal, moment: Moment) -> dict[str, Any]:
    return {
        "time": moment.unix(refusal.at),
        "request_id": refusal.id,
        "method": refusal.method,
        "path": refusal.path,
        "status": refusal.status,
        "code": refusal.code,
    }


def _worker_event(event: WorkerEvent, moment: Moment) -> dict[str, Any]:
    return {
        "time": moment.unix(event.at),
        "model": event.model,
        "incarnation": event.incarnation,
        "pid": event.pid,
        "what": event.what,
    }


# --- the last minutes --------------------------------------------------------------------------------


def history(samples: Iterable[Sample], moment: Moment) -> dict[str, Any]:
    """`rows` are samples, the eldest first, each with a value for every one of `columns`."""
    rows = [[moment.unix(sample.at), *(getattr(sample, name) for name in COLUMNS[1:])] for sample in samples]
    return {"every_s": SAMPLE_S, "columns": ["time", *COLUMNS[1:]], "rows": rows}


def reuse_of(reuse: Reuse | None) -> dict[str, Any] | None:
    """What of a prompt need not be computed, and what is not run though it was not."""
    if reuse is None:
        return None
    told: dict[str, Any] = {"tokens": reuse.tokens, "tier": reuse.tier, "miss": reuse.miss}
    return told | {"sparse_tokens": reuse.sparse_tokens} if reuse.left_out else told
