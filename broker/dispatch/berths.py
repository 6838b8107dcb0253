"""Who flies next: flights that wait at the gateway, and the workers that could take them. Pure.

First those who lost their worker and cannot have caused its death, all at once. Then suspects, as far as
there are rows: who merely waits in a worker when it dies would be suspected anew. Then those who have one
more try, one request at a time, each only when everybody aboard has got through, so that another death would
be its own; and then nobody else comes aboard. Newcomers go last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from broker.dispatch.fleet import Worker
from broker.dispatch.flight import Flight
from broker.dispatch.routing import Desk
from broker.dispatch.suspects import Standing, mark_of

Judge = Callable[[Flight], Standing]
Pick = Callable[[Flight, Sequence[Desk]], Desk]


@dataclass(slots=True)
class Berth:
    """A worker that serves, and who is aboard. `settled`: it has lived for a moment."""

    desk: Desk
    rows: int
    settled: bool
    unproven: int
    tries: bytes | None = None
    """The mark of the request that is being tried alone."""

    @property
    def worker(self) -> Worker:
        return self.desk.worker

    @classmethod
    def of(cls, desk: Desk, aboard: Sequence[Flight], standing: Judge, *, settled: bool) -> Berth:
        worker = desk.worker
        unproven = [flight for flight in aboard if not flight.proven or standing(flight)]
        rows = worker.ready.running_max if worker.ready else 0
        tried = [mark_of(flight) for flight in unproven if standing(flight) >= Standing.ALONE]
        return cls(desk, rows, settled, len(unproven), tried[0] if tried else None)

    def takes(self, flight: Flight, standing: Standing) -> bool:
        worker = self.worker
        if worker.model != flight.model:
            return False
        if not flight.goes_on_with(worker.identity, stands_in=worker.stands_in):
            return False
        if self.tries is not None:
            return standing is Standing.ALONE and self._has_row() and mark_of(flight) == self.tries
        match standing:
            case Standing.FREE:
                return True
            case Standing.SUSPECT:
                return self._has_row()
            case Standing.ALONE:
                return self.settled and not self.unproven and self._has_row()
            case Standing.HELD:
                return False

    def _has_row(self) -> bool:
        return self.desk.aboard < self.rows

    def take(self, flight: Flight, standing: Standing) -> None:
        self.desk.aboard += 1
        self.unproven += 1
        if standing is Standing.ALONE:
            self.tries = mark_of(flight)


def departures(
    waiting: Sequence[Flight], berths: Sequence[Berth], standing: Judge, pick: Pick
) -> Iterator[tuple[Flight, Berth]]:
    """Which of those who wait goes where, in order; `pick` chooses among those open to one. Take away a berth
    that turns out to be out of reach."""
    standings = [(flight, standing(flight)) for flight in waiting]
    back = [pair for pair in standings if pair[0].legs or pair[1]]
    newcomers = [pair for pair in standings if not pair[0].legs and not pair[1]]
    left: set[str] = set()
    """Models of which suspects are left behind."""
    for flight, stands in (*sorted(back, key=lambda pair: pair[1]), *newcomers):
        if not flight.legs and not stands and flight.model in left:
            continue
        open_to = {berth.desk: berth for berth in berths if berth.takes(flight, stands)}
        if open_to:
            berth = open_to[pick(flight, list(open_to))]
            berth.take(flight, stands)
            yield flight, berth
        elif stands in (Standing.SUSPECT, Standing.ALONE):
            left.add(flight.model)
