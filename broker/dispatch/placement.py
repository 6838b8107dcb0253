"""Placement: assign waiting flights to workers, in order of their retry class. Pure.

First flights that lost their worker and cannot have crashed it, all at once. Then suspects, up to the number
of rows: one that only queued in a crashing worker would become a suspect again. Then requests on their last
try, one at a time and isolated: only when all other flights of the worker have made progress, so that another
crash is its own, and with no others admitted meanwhile. New flights come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from broker.dispatch.fleet import Worker
from broker.dispatch.flight import Flight
from broker.dispatch.quarantine import RetryClass, fingerprint_of
from broker.dispatch.routing import WorkerLoad

Judge = Callable[[Flight], RetryClass]
Pick = Callable[[Flight, Sequence[WorkerLoad]], WorkerLoad]


@dataclass(slots=True)
class PlacementTarget:
    """A serving worker with its free rows. `is_stable`: it has run for `STABLE_S`."""

    worker_load: WorkerLoad
    rows: int
    is_stable: bool
    unproven: int
    tries: bytes | None = None
    """The fingerprint of the request that is being tried in isolation."""

    @property
    def worker(self) -> Worker:
        return self.worker_load.worker

    @classmethod
    def of(
        cls, worker_load: WorkerLoad, assigned: Sequence[Flight], retry_class: Judge, *, is_stable: bool
    ) -> PlacementTarget:
        worker = worker_load.worker
        unproven = [flight for flight in assigned if not flight.proven or retry_class(flight)]
        rows = worker.ready.running_max if worker.ready else 0
        tried = [fingerprint_of(flight) for flight in unproven if retry_class(flight) >= RetryClass.ISOLATE]
        return cls(worker_load, rows, is_stable, len(unproven), tried[0] if tried else None)

    def takes(self, flight: Flight, retry_class: RetryClass) -> bool:
        worker = self.worker
        if worker.model != flight.model:
            return False
        if not flight.can_continue_on(worker.identity, stands_in=worker.stands_in):
            return False
        if not flight.fits_adapter(worker.digest_of(flight.adapter)):
            return False
        if self.tries is not None:
            return (
                retry_class is RetryClass.ISOLATE and self._has_row() and fingerprint_of(flight) == self.tries
            )
        match retry_class:
            case RetryClass.CLEAR:
                return True
            case RetryClass.SUSPECT:
                return self._has_row()
            case RetryClass.ISOLATE:
                return self.is_stable and not self.unproven and self._has_row()
            case RetryClass.QUARANTINED:
                return False

    def _has_row(self) -> bool:
        return self.worker_load.assigned < self.rows

    def take(self, flight: Flight, retry_class: RetryClass) -> None:
        self.worker_load.assigned += 1
        self.unproven += 1
        if retry_class is RetryClass.ISOLATE:
            self.tries = fingerprint_of(flight)


def placements(
    waiting: Sequence[Flight], targets: Sequence[PlacementTarget], retry_class: Judge, pick: Pick
) -> Iterator[tuple[Flight, PlacementTarget]]:
    """Yield waiting flights with their targets, in order; `pick` chooses among the eligible ones.

    The caller removes a target from `targets` that turns out to be unreachable.
    """
    retry_classes = [(flight, retry_class(flight)) for flight in waiting]
    back = [pair for pair in retry_classes if pair[0].attempts or pair[1]]
    new_requests = [pair for pair in retry_classes if not pair[0].attempts and not pair[1]]
    left: set[str] = set()
    """Models with suspects that found no place."""
    for flight, stands in (*sorted(back, key=lambda pair: pair[1]), *new_requests):
        if not flight.attempts and not stands and flight.model in left:
            continue
        open_to = {target.worker_load: target for target in targets if target.takes(flight, stands)}
        others = {d: b for d, b in open_to.items() if d.worker.incarnation != flight.starved_by}
        if open_to := others or open_to:
            target = open_to[pick(flight, list(open_to))]
            target.take(flight, stands)
            yield flight, target
        elif stands in (RetryClass.SUSPECT, RetryClass.ISOLATE):
            left.add(flight.model)
