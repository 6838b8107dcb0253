"""Who brought a worker down? Pure: deaths and times come in, who is to blame goes out.

Flights that were aboard a worker when it died are suspects. They fly again one at a time, each beside such as
have proven that they can go on, until it has proven the same. A worker that dies with one suspect aboard, and
with nobody else who has not proven himself, charges its request; a request charged twice without having got
through in between is guilty. In every other case all who were aboard are suspects, and nobody is charged.

So a request that kills costs three deaths: one in company, two alone. One that merely was on probation when
somebody pulled the plug goes last the next time, when the others are through, and is charged again only if
the plug is pulled again while it has its turn.

Charges stand against the request, whatever its id and seed: copies of one that kills are not tried one by
one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from broker.inflight import Flight
from protocol.errors import Code, RequestError
from protocol.messages import Generate

CHARGES_MAX = 2
REMEMBERED_S = 600.0
REMEMBERED_MAX = 1024

GUILTY = "This request has brought the worker down repeatedly; it is not tried again for ten minutes."

_encode = msgspec.msgpack.Encoder().encode


def fingerprint(request: Generate) -> bytes:
    """The same for requests that differ in their id, their seed and how far they have come only."""
    sampling = msgspec.structs.replace(request.sampling, seed=0)
    bare = msgspec.structs.replace(request, id="", incarnation="", resume=[], sampling=sampling)
    try:
        return hashlib.sha256(_encode(bare)).digest()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b""  # it cannot be sent to a worker either


def _mark(flight: Flight) -> bytes:
    flight.fingerprint = flight.fingerprint or fingerprint(flight.request)
    return flight.fingerprint


class Suspects:
    """The charges against requests: at most `REMEMBERED_MAX`, each for `REMEMBERED_S` after its last one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._charges: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def check(self, requests: Sequence[Generate]) -> None:
        """Raises `RequestError(worker_crashed)` for a request that has been found guilty."""
        self._forget()
        if self._charges and any(self._charged(fingerprint(r)) >= CHARGES_MAX for r in requests):
            raise RequestError(Code.WORKER_CRASHED, GUILTY)

    def charges(self, flight: Flight) -> int:
        return self._charged(_mark(flight)) if self._charges else 0

    def _charged(self, mark: bytes) -> int:
        count, until = self._charges.get(mark, (0, 0.0))
        return count if self._clock() < until else 0

    def died(self, aboard: Sequence[Flight]) -> bytes | None:
        """A worker died with these aboard. The fingerprint of the request that is charged, if one is."""
        tried = [flight for flight in aboard if flight.suspect]
        if len(tried) == 1 and all(flight.proven for flight in aboard if not flight.suspect):
            return self._charge(_mark(tried[0]))
        for flight in aboard:
            flight.suspect = True
        return None

    def _charge(self, mark: bytes) -> bytes:
        self._charges[mark] = self._charged(mark) + 1, self._clock() + REMEMBERED_S
        self._charges.move_to_end(mark)
        if len(self._charges) > REMEMBERED_MAX:
            self._charges.popitem(last=False)
        return mark

    def acquit(self, mark: bytes) -> None:
        """The worker over which this request was charged last has not died after all."""
        count, until = self._charges.get(mark, (0, 0.0))
        if count > 1:
            self._charges[mark] = count - 1, until
        else:
            self._charges.pop(mark, None)

    def _forget(self) -> None:
        while self._charges and next(iter(self._charges.values()))[1] <= self._clock():
            self._charges.popitem(last=False)

    def is_guilty(self, flight: Flight) -> bool:
        return self.charges(flight) >= CHARGES_MAX

    def proven(self, flight: Flight) -> None:
        """The flight has got past the point where its worker died."""
        flight.suspect = False
        if 0 < self.charges(flight) < CHARGES_MAX:
            del self._charges[_mark(flight)]
