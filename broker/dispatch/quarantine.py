"""Crash attribution and quarantine of requests that crash their worker. Pure; the clock is injected.

Each crash is recorded with its candidates: the requests on the worker, but only those that had not yet passed
the point of an earlier crash, if there were such. A request that passes that point is cleared of the crash. A
request may be a candidate of three crashes, plus one for each crash without candidates, plus one for each
other request with as many crashes, up to a limit. The count decides how it is retried (`RetryClass`):

* none: at once, with all others;
* some: at once with other suspects, up to the number of rows. A single external kill costs clients only a
  pause;
* one below the limit: in isolation, beside no request that has not made progress, and only on a worker that
  has run for a moment without it;
* at the limit: not at all. It is quarantined once a worker has run for a while without it, while the other
  requests make progress.

So a poison request costs three crashes, in prefill or at any token: one among others, one among suspects, one
in isolation. External kills produce crashes without candidates, or many candidates; both raise the limit, and
further kills delay the decision. A harmless request is quarantined only if unrelated crashes hit it three
times in a row, the third during its isolated retry of milliseconds, with no other unexplained crash within
ten minutes and none after it.

Crashes and quarantine are recorded by the request's fingerprint, which excludes id and seed: copies of a
poison request are not tried one by one.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter

import msgspec
from msgspec import Struct

from broker.dispatch.flight import PROVEN_PIECES, Flight
from protocol.errors import Code, RequestError
from protocol.messages import Generate, Request
from protocol.types import Count, Id, Seconds

CRASHES_MAX = 3
"""Crash limit of a request if every crash has candidates and no other request has as many crashes."""
CRASHES_RAISED_MAX = 10
"""Upper bound of the raised crash limit, not counting a crash during another request's isolated retry."""
STABLE_S = 1.0
"""Uptime of a worker before an isolated retry; an external killer of new workers strikes earlier."""
QUARANTINE_GRACE_S = 5.0
"""Time without crashes before a request at its limit is quarantined."""
REMEMBERED_S = 600.0
REMEMBERED_MAX = 1024
CRASHES_REMEMBERED_MAX = 64
NEVER = math.inf

QUARANTINED_MESSAGE = "This request has crashed its worker repeatedly. It is quarantined for ten minutes."

_encode = msgspec.msgpack.Encoder().encode
_NOT_RESTORED = 2**62
"""Progress of a candidate that is not there any more: nothing gets beyond it."""
_time_of = attrgetter("at")


class RetryClass(IntEnum):
    """Retry class of a flight: how it may be dispatched."""

    CLEAR = 0
    SUSPECT = 1
    ISOLATE = 2
    QUARANTINED = 3
    """Not dispatched: it awaits the decision on its quarantine."""


@dataclass(slots=True, eq=False)
class Crash:
    """A worker crash. `candidates`: fingerprint -> progress of each possible cause.

    Cleared requests are removed. Of several copies of a request, the furthest progress counts.
    """

    worker: str
    model: str
    at: float
    candidates: dict[bytes, int]


class CrashRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A crash that a request may have caused, for its checkpoint.

    `age_s`: seconds since the crash. `reached`: the request's progress at the crash. `others`: number of
    other candidates.
    """

    worker: Id
    age_s: Seconds
    reached: Count
    others: Count = 0


def fingerprint(request: Request, model: str) -> bytes:
    """Hash a request without its id, client, seed, source and progress; empty if it cannot be encoded."""
    told: dict[str, object] = {"answered": []}
    if isinstance(request, Generate):
        sampling = msgspec.structs.replace(request.sampling, seed=0)
        told = {"sampling": sampling, "resume": [], "scored": 0, "left_out": []}
    bare = msgspec.structs.replace(request, id="", incarnation="", source="", client="", **told)
    try:
        return hashlib.sha256(_encode((model, bare))).digest()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b""  # nor can it be sent to a worker


def fingerprint_of(flight: Flight) -> bytes:
    """Return the fingerprint of the flight's request, computed once."""
    flight.fingerprint = flight.fingerprint or fingerprint(flight.request, flight.model)
    return flight.fingerprint


class CrashAttribution:
    """The crashes of the last ten minutes, and the quarantined requests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._crashes: deque[Crash] = deque(maxlen=CRASHES_REMEMBERED_MAX)
        self._quarantined: OrderedDict[bytes, float] = OrderedDict()
        self._thresholds: dict[str, tuple[int, set[bytes]]] = {}
        """Cache by model, until the next change: crash limit, and the fingerprints that have reached it."""

    def check(self, requests: Sequence[Request], model: str) -> None:
        """Raise `RequestError(worker_crashed)` for a quarantined request."""
        self._forget()
        if self._quarantined and any(
            fingerprint(request, model) in self._quarantined for request in requests
        ):
            raise RequestError(Code.WORKER_CRASHED, QUARANTINED_MESSAGE)

    def crashes(self, flight: Flight) -> int:
        """Return the number of crashes that the flight may have caused."""
        self._forget()
        if not self._crashes:
            return 0
        mark = fingerprint_of(flight)
        return sum(mark in worker_crash.candidates for worker_crash in self._crashes)

    def retry_class(self, flight: Flight) -> RetryClass:
        """Return how the flight may be dispatched."""
        count = self.crashes(flight) if flight.suspect else 0
        if not count:
            return RetryClass.CLEAR
        left = self._crash_limit(flight) - count
        if left > 1:
            return RetryClass.SUSPECT
        return RetryClass.QUARANTINED if left < 1 and self._is_alone_to_blame(flight) else RetryClass.ISOLATE

    def _is_alone_to_blame(self, flight: Flight) -> bool:
        """Return whether it is the only candidate of a crash; False if an unexplained one was dropped."""
        return any([*worker_crash.candidates] == [fingerprint_of(flight)] for worker_crash in self._crashes)

    def _crash_limit(self, flight: Flight) -> int:
        """Return the crash limit, raised by unexplained crashes and by other requests that reached it."""
        bar, suspected = self._threshold(flight.model)
        return min(bar + len(suspected - {fingerprint_of(flight)}), CRASHES_RAISED_MAX)

    def _threshold(self, model: str) -> tuple[int, set[bytes]]:
        if model not in self._thresholds:
            crashes = [worker_crash for worker_crash in self._crashes if worker_crash.model == model]
            bar = CRASHES_MAX + sum(not worker_crash.candidates for worker_crash in crashes)
            counts = Counter(mark for worker_crash in crashes for mark in worker_crash.candidates)
            self._thresholds[model] = bar, {mark for mark, count in counts.items() if count >= bar}
        return self._thresholds[model]

    def on_crash(self, worker: str, model: str, assigned: Sequence[Flight]) -> None:
        """Record the crash of a serving worker with its flights. Repeated reports count once."""
        if any(worker_crash.worker == worker for worker_crash in self._crashes):
            return
        retry_classes = [(flight, self.retry_class(flight)) for flight in assigned]
        tried = any(retry_class for _, retry_class in retry_classes)
        crash_attribution = [f for f, retry_class in retry_classes if retry_class or not (tried and f.proven)]
        candidates: dict[bytes, int] = {}
        for flight in crash_attribution:
            flight.suspect = True
            mark = fingerprint_of(flight)
            candidates[mark] = max(flight.reached, candidates.get(mark, 0))
        self._crashes.append(Crash(worker, model, self._clock(), candidates))
        self._thresholds.clear()

    def withdraw(self, worker: str) -> None:
        """Remove the crash of a worker that has come back."""
        for worker_crash in [worker_crash for worker_crash in self._crashes if worker_crash.worker == worker]:
            self._crashes.remove(worker_crash)
        self._thresholds.clear()

    def clear(self, flight: Flight) -> None:
        """Clear the flight of crashes whose point it has passed, or of all up to its end if it has ended.

        Copies of a request share a fingerprint: crashes beyond this flight's progress are not cleared.
        """
        margin = PROVEN_PIECES if flight.terminal is None else 0
        mark, reached = fingerprint_of(flight), flight.reached - margin
        for worker_crash in self._crashes:
            if worker_crash.candidates.get(mark, NEVER) <= reached:
                del worker_crash.candidates[mark]
        self._thresholds.clear()
        flight.suspect = self.crashes(flight) > 0

    def records(self, flight: Flight) -> list[CrashRecord]:
        """Return the crashes that the flight may have caused, oldest first."""
        if not self.crashes(flight):
            return []
        now, mark = self._clock(), fingerprint_of(flight)
        return [
            CrashRecord(
                worker=crash.worker,
                age_s=now - crash.at,
                reached=crash.candidates[mark],
                others=len(crash.candidates) - 1,
            )
            for crash in self._crashes
            if mark in crash.candidates
        ]

    def restore(self, flight: Flight, records: Sequence[CrashRecord], elapsed_s: float) -> None:
        """Record again the crashes of a restored flight, of whose checkpoint `elapsed_s` have passed.

        Flights that were candidates of one crash become so again. Candidates that are not restored are
        replaced by one that nothing clears, so that a crash never has fewer candidates than it had.
        """
        flight.suspect = self.crashes(flight) > 0
        if not records:
            return
        now, known = self._clock(), {crash.worker: crash for crash in self._crashes}
        for record in records[-CRASHES_REMEMBERED_MAX:]:
            crash = known.get(record.worker)
            if crash is None:
                crash = Crash(record.worker, flight.model, now - record.age_s - elapsed_s, {})
                if record.others:
                    crash.candidates[b"not restored " + record.worker.encode()] = _NOT_RESTORED
                self._crashes.append(crash)
            mark = fingerprint_of(flight)
            crash.candidates[mark] = max(record.reached, crash.candidates.get(mark, 0))
        self._crashes = deque(sorted(self._crashes, key=_time_of), maxlen=CRASHES_REMEMBERED_MAX)
        self._thresholds.clear()
        flight.suspect = self.crashes(flight) > 0

    def is_quarantined(self, flight: Flight) -> bool:
        """Return whether a request like this one is quarantined."""
        self._forget()
        return fingerprint_of(flight) in self._quarantined

    def quarantine(self, flight: Flight) -> None:
        """Quarantine the request, and remove it and the crashes that it alone explains."""
        mark = fingerprint_of(flight)
        self._quarantined[mark] = self._clock() + REMEMBERED_S
        self._quarantined.move_to_end(mark)
        if len(self._quarantined) > REMEMBERED_MAX:
            self._quarantined.popitem(last=False)
        for worker_crash in [
            worker_crash for worker_crash in self._crashes if mark in worker_crash.candidates
        ]:
            del worker_crash.candidates[mark]
            if not worker_crash.candidates:  # explained by this request
                self._crashes.remove(worker_crash)
        self._thresholds.clear()

    def _forget(self) -> None:
        now = self._clock()
        while self._crashes and self._crashes[0].at + REMEMBERED_S <= now:
            self._crashes.popleft()
            self._thresholds.clear()
        while self._quarantined and next(iter(self._quarantined.values())) <= now:
            self._quarantined.popitem(last=False)
