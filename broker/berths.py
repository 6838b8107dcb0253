"""Who flies next: flights that wait at the gateway, and the workers that could take them. Pure.

First those who lost their worker and are not suspected of its death, all at once. Then suspects, one at a
time, each only when everybody aboard has proven that he can go on, so that another death would be its own.
Then newcomers. A worker with a suspect aboard takes nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from broker.fleet import Worker
from broker.inflight import Flight


@dataclass(slots=True)
class Berth:
    """A worker that serves, and who is aboard."""

    worker: Worker
    aboard: int
    unproven: int
    tries: bool
    """A suspect is aboard."""

    @classmethod
    def of(cls, worker: Worker, aboard: Sequence[Flight]) -> Berth:
        unproven = sum(not flight.proven for flight in aboard)
        return cls(worker, len(aboard), unproven, tries=any(flight.suspect for flight in aboard))

    def takes(self, flight: Flight) -> bool:
        fits = self.worker.model == flight.model and not self.tries
        return fits and not (flight.suspect and self.unproven)

    def take(self, flight: Flight) -> None:
        self.aboard += 1
        self.unproven += 1
        self.tries = flight.suspect


def departures(
    waiting: Sequence[Flight], berths: Sequence[Berth], charges: Callable[[Flight], int]
) -> Iterator[tuple[Flight, Berth]]:
    """Which of those who wait goes where, in order. A berth that turns out to be out of reach: take it away.

    `charges`: against a suspect; who has any goes last.
    """
    returning = [flight for flight in waiting if flight.legs and not flight.suspect]
    suspects = sorted((flight for flight in waiting if flight.suspect), key=charges)
    newcomers = [flight for flight in waiting if not flight.legs]
    suspected = {flight.model for flight in suspects}
    for flight in (*returning, *suspects, *newcomers):
        if not flight.legs and flight.model in suspected:
            continue
        open_to = [berth for berth in berths if berth.takes(flight)]
        if open_to:
            berth = min(open_to, key=lambda berth: berth.aboard)
            berth.take(flight)
            yield flight, berth
