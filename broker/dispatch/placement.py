"""Placement: assign waiting flights to workers. Pure.

First flights that lost their worker and cannot have crashed it, all at once. Then suspects, which were on a
worker that crashed: one request at a time, and only when all other flights of the worker have made progress,
so that another crash is its own; none is admitted meanwhile. New flights come next, and lines of batches
last: one that is a suspect waits until the worker has no other requests, which it would give way to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from broker.dispatch.fleet import Worker
from broker.dispatch.flight import Flight
from broker.dispatch.routing import WorkerLoad

Pick = Callable[[Flight, Sequence[WorkerLoad]], WorkerLoad]


@dataclass(slots=True)
class PlacementTarget:
    """A serving worker. `requests`, `lines`: number of its flights, and of those that are lines of batches.
    `unproven`: number of those without progress. `tries`: the group of a suspect that it has."""

    worker_load: WorkerLoad
    rows: int
    requests: int
    lines: int
    unproven: int
    tries: str | None

    @property
    def worker(self) -> Worker:
        return self.worker_load.worker

    @classmethod
    def of(cls, worker_load: WorkerLoad, assigned: Sequence[Flight]) -> PlacementTarget:
        ready, lines = worker_load.worker.ready, sum(flight.is_batch for flight in assigned)
        return cls(
            worker_load,
            rows=ready.running_max if ready else 0,
            requests=len(assigned) - lines,
            lines=lines,
            unproven=sum(not flight.proven for flight in assigned),
            tries=next((flight.group for flight in assigned if flight.is_suspect), None),
        )

    def takes(self, flight: Flight) -> bool:
        worker = self.worker
        if worker.model != flight.model:
            return False
        if not flight.can_continue_on(worker.identity, stands_in=worker.stands_in):
            return False
        if not flight.fits_adapter(worker.digest_of(flight.adapter)):
            return False
        if not flight.is_suspect:
            return self.tries is None
        is_alone = not self.unproven if self.tries is None else self.tries == flight.group
        return is_alone and self._has_row(flight)

    def _has_row(self, flight: Flight) -> bool:
        if flight.is_batch:
            return not self.requests and self.lines < self.rows
        return self.requests < self.rows

    def take(self, flight: Flight) -> None:
        self.worker_load.assigned += 1
        self.requests += not flight.is_batch
        self.lines += flight.is_batch
        self.unproven += 1
        if flight.is_suspect:
            self.tries = flight.group


def placements(
    waiting: Sequence[Flight], targets: Sequence[PlacementTarget], pick: Pick
) -> Iterator[tuple[Flight, PlacementTarget]]:
    """Yield waiting flights with their targets, in order; `pick` chooses among the eligible ones.

    The caller removes a target from `targets` that turns out to be unreachable.
    """
    left: set[str] = set()
    """Models with suspects that found no place."""
    for flight in sorted(waiting, key=_order):
        if _is_new(flight) and flight.model in left:
            continue
        open_to = {target.worker_load: target for target in targets if target.takes(flight)}
        others = {
            load: target for load, target in open_to.items() if load.worker.incarnation != flight.starved_by
        }
        if open_to := others or open_to:
            target = open_to[pick(flight, list(open_to))]
            target.take(flight)
            yield flight, target
        elif flight.is_suspect:
            left.add(flight.model)


def _order(flight: Flight) -> tuple[bool, bool, int]:
    return flight.is_batch, _is_new(flight), flight.crash_count


def _is_new(flight: Flight) -> bool:
    return not (flight.attempts or flight.is_suspect)
