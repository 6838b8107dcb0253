"""Who brought a worker down? Pure: deaths and times come in, who is to blame goes out.

A death is remembered with the requests that can have caused it: those aboard; of them only such as had not
got through the point of an earlier death yet, if there were any. A request that gets through is struck from
every death. A request may cause three deaths, one more for each death that nobody is left to have caused,
and one more for each other request that has come as far, up to a limit. How it flies on depends on how many
it may have caused so far:

* none: at once, with whoever else there is;
* some: at once with the others of that kind, as far as there are rows. Whoever has pulled the plug once has
  cost its clients a pause and no more;
* all but one: alone, beside none but those that have got through, and only when a worker has lived for a
  moment without it;
* all: not at all. It is guilty when a worker has then lived without it for a while, in which the others get
  through.

So a request that kills costs three deaths, in a prefill or over any token: one in company, one among
suspects, one alone. Somebody who pulls the plug brings about deaths without a cause, or many that seem to
have caused them, either of which raises the bar, and who goes on does not let a verdict come. To be taken for
guilty an innocent request must be hit three times in a row, the third time in the milliseconds that it takes
to try it alone, by somebody who has left the others in peace for ten minutes and lets go then.

Deaths and verdicts stand against what is asked of a model, whatever the request's id and seed: copies of one
that kills are not tried one by one.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from broker.dispatch.flight import PROVEN_PIECES, Flight
from protocol.errors import Code, RequestError
from protocol.messages import Generate, Request

DEATHS_MAX = 3
"""So many one request may cause, where every death has a cause and nobody else is as suspect."""
DEATHS_RAISED_MAX = 10
"""So many it may in any case, and one that falls into the trial of another."""
SETTLED_S = 1.0
"""So long a worker lives before somebody is tried alone: who kills it as soon as it comes shows himself."""
REMAND_S = 5.0
"""So long it has lived without a request before that is found guilty."""
REMEMBERED_S = 600.0
REMEMBERED_MAX = 1024
DEATHS_REMEMBERED_MAX = 64
NEVER = math.inf

GUILTY = "This request has brought the worker down repeatedly; it is not tried again for ten minutes."

_encode = msgspec.msgpack.Encoder().encode


class Standing(IntEnum):
    """How a flight may go on."""

    FREE = 0
    SUSPECT = 1
    ALONE = 2
    HELD = 3
    """Not at all: it awaits its verdict."""


@dataclass(slots=True, eq=False)
class Death:
    """`candidates`: the marks of the requests that may have caused it and were not cleared since, each with
    how far it had come then (the furthest that a copy of it had)."""

    worker: str
    model: str
    at: float
    candidates: dict[bytes, int]


def fingerprint(request: Request, model: str) -> bytes:
    """The same for requests to a model that differ only in id, seed, their place among others and how far
    they have come."""
    told: dict[str, object] = {"answered": []}
    if isinstance(request, Generate):
        sampling = msgspec.structs.replace(request.sampling, seed=0)
        told = {"sampling": sampling, "resume": [], "scored": 0, "left_out": []}
    bare = msgspec.structs.replace(request, id="", incarnation="", source="", **told)
    try:
        return hashlib.sha256(_encode((model, bare))).digest()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b""  # it cannot be sent to a worker either


def mark_of(flight: Flight) -> bytes:
    """The fingerprint of its request, which is taken once."""
    flight.fingerprint = flight.fingerprint or fingerprint(flight.request, flight.model)
    return flight.fingerprint


class Suspects:
    """The deaths of the last ten minutes, and who was found guilty of any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deaths: deque[Death] = deque(maxlen=DEATHS_REMEMBERED_MAX)
        self._guilty: OrderedDict[bytes, float] = OrderedDict()
        self._bars: dict[str, tuple[int, set[bytes]]] = {}
        """By model, until the next change: how many deaths are too many, and who may have caused so many."""

    def check(self, requests: Sequence[Request], model: str) -> None:
        """Raises `RequestError(worker_crashed)` for a request that has been found guilty."""
        self._forget()
        if self._guilty and any(fingerprint(request, model) in self._guilty for request in requests):
            raise RequestError(Code.WORKER_CRASHED, GUILTY)

    def deaths(self, flight: Flight) -> int:
        """How many it may have caused."""
        self._forget()
        if not self._deaths:
            return 0
        mark = mark_of(flight)
        return sum(mark in death.candidates for death in self._deaths)

    def standing(self, flight: Flight) -> Standing:
        count = self.deaths(flight) if flight.suspect else 0
        if not count:
            return Standing.FREE
        left = self._deaths_max(flight) - count
        if left > 1:
            return Standing.SUSPECT
        return Standing.HELD if left < 1 and self._is_alone_to_blame(flight) else Standing.ALONE

    def _is_alone_to_blame(self, flight: Flight) -> bool:
        """For a death at least; unless one without a cause was withdrawn or forgotten meanwhile."""
        return any([*death.candidates] == [mark_of(flight)] for death in self._deaths)

    def _deaths_max(self, flight: Flight) -> int:
        """One more for each death without a cause, and for each other request that seems to be as guilty."""
        bar, suspected = self._bar(flight.model)
        return min(bar + len(suspected - {mark_of(flight)}), DEATHS_RAISED_MAX)

    def _bar(self, model: str) -> tuple[int, set[bytes]]:
        if model not in self._bars:
            deaths = [death for death in self._deaths if death.model == model]
            bar = DEATHS_MAX + sum(not death.candidates for death in deaths)
            counts = Counter(mark for death in deaths for mark in death.candidates)
            self._bars[model] = bar, {mark for mark, count in counts.items() if count >= bar}
        return self._bars[model]

    def died(self, worker: str, model: str, aboard: Sequence[Flight]) -> None:
        """A worker that served has died with these aboard. What is said twice of one counts once."""
        if any(death.worker == worker for death in self._deaths):
            return
        standings = [(flight, self.standing(flight)) for flight in aboard]
        tried = any(standing for _, standing in standings)
        suspects = [f for f, standing in standings if standing or not (tried and f.proven)]
        candidates: dict[bytes, int] = {}
        for flight in suspects:
            flight.suspect = True
            mark = mark_of(flight)
            candidates[mark] = max(flight.reached, candidates.get(mark, 0))
        self._deaths.append(Death(worker, model, self._clock(), candidates))
        self._bars.clear()

    def withdraw(self, worker: str) -> None:
        """This worker has not died after all."""
        for death in [death for death in self._deaths if death.worker == worker]:
            self._deaths.remove(death)
        self._bars.clear()

    def clear(self, flight: Flight) -> None:
        """The flight has got past the points where its workers died, or to its end.

        A copy of one that kills later on does not speak for it before it has come as far.
        """
        margin = PROVEN_PIECES if flight.terminal is None else 0
        mark, reached = mark_of(flight), flight.reached - margin
        for death in self._deaths:
            if death.candidates.get(mark, NEVER) <= reached:
                del death.candidates[mark]
        self._bars.clear()
        flight.suspect = self.deaths(flight) > 0

    def convict(self, flight: Flight) -> None:
        """It has caused the deaths that it may have caused: nobody else has."""
        mark = mark_of(flight)
        self._guilty[mark] = self._clock() + REMEMBERED_S
        self._guilty.move_to_end(mark)
        if len(self._guilty) > REMEMBERED_MAX:
            self._guilty.popitem(last=False)
        for death in [death for death in self._deaths if mark in death.candidates]:
            del death.candidates[mark]
            if not death.candidates:  # which is not to say that it had no cause
                self._deaths.remove(death)
        self._bars.clear()

    def _forget(self) -> None:
        now = self._clock()
        while self._deaths and self._deaths[0].at + REMEMBERED_S <= now:
            self._deaths.popleft()
            self._bars.clear()
        while self._guilty and next(iter(self._guilty.values())) <= now:
            self._guilty.popitem(last=False)
