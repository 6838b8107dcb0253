"""Routing: choose one of several workers for a request, by load and prefix affinity. Pure.

The *least-loaded* worker would finish the request first if nothing were cached. If it has over
`EXCESS_REQUESTS` requests more than another one, relative to their speed, that would finish about as soon,
the other one is used. A worker that holds a prefix of the prompt is preferred if its excess load over the
least-loaded worker is at most `EXCESS_REQUESTS` × overlap, both in requests and in multiples of this
request's cost. For a merely common prefix the factor is `EXCESS_BEGUN_ALIKE`. So conversations stay on their
worker, common prefixes are soon on every worker, and a burst with one prompt spreads.

If a model has had only one worker for a while, its prompts are not hashed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from broker.dispatch.cost_model import ANSWER_TOKENS, Throughput, cost_s, left_s, smoothed_length, usual_speed
from broker.dispatch.fleet import Worker
from broker.dispatch.flight import Flight
from broker.dispatch.prefix_hashes import NONE, PrefixHashes, prefix_hashes
from protocol.messages import Finished, Generate, Request
from protocol.tasks import runs_nothing
from protocol.types import RoutingMethod

EXCESS_REQUESTS = 4
EXCESS_BEGUN_ALIKE = 1
SHARED_S = 600.0
"""Time for which prompts are still hashed after a model had several workers: one may come back soon."""

HASHES_MAX = 32_768
"""About 15 MB with one worker each; enough for 250 of the longest conversations."""
HOMES_MAX = 8


@dataclass(frozen=True, slots=True)
class _Home:
    """A worker that has computed a prefix. `store`: its prefix store on disk, as it reports; empty if none.

    `whole`: a prompt ended here, so a longer prompt with this prefix continues that one.
    """

    store: str
    noted_at: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class PrefixOverlap:
    """Overlap of a prompt with a worker's prefixes: `share` of its bytes, 0 to 1.

    `own`: the overlap is a whole earlier prompt, repeated or continued by this one.
    """

    share: float = 0.0
    own: bool = False


NOTHING = PrefixOverlap()


class Affinity:
    """Prefix affinity: which workers have computed a prefix of a prompt, from the requests sent to them.

    For each prefix hash (`PrefixHashes.hashes`) the incarnations that had a request with it are recorded,
    with the time. A dead incarnation never matches again. Its prefixes on disk count for workers that open
    the same store later, because a worker reads the store only when it starts.

    Invariants: at most `HASHES_MAX` hashes with `HOMES_MAX` workers each, evicted least recently used first.
    No text of a prompt is stored.
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[bytes, dict[str, _Home]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of prefix hashes."""
        return len(self._homes)

    def note(self, prompt: PrefixHashes, worker: Worker, now: float) -> None:
        """Record that a prompt was dispatched to `worker`."""
        within, whole = _Home(worker.store, now), _Home(worker.store, now, whole=True)
        for mark, size in prompt.hashes:
            homes = self._homes.setdefault(mark, {})
            before = homes.pop(worker.incarnation, within)
            homes[worker.incarnation] = whole if before.whole or size == prompt.size else within
            if len(homes) > HOMES_MAX:
                del homes[next(iter(homes))]
            self._homes.move_to_end(mark)
        while len(self._homes) > HASHES_MAX:
            self._homes.popitem(last=False)

    def overlap(self, prompt: PrefixHashes, worker: Worker) -> PrefixOverlap:
        """Return how much of the prompt `worker` has probably computed, or can read from its store."""
        for mark, size in reversed(prompt.hashes):
            if (homes := self._homes.get(mark)) and (home := _home(homes, worker)):
                return PrefixOverlap(size / prompt.size, home.whole)
        return NOTHING

    def forget(self, incarnation: str) -> None:
        """Drop all records of a worker whose cache was cleared."""
        for mark in [
            mark for mark, homes in self._homes.items() if homes.pop(incarnation, None) and not homes
        ]:
            del self._homes[mark]


def _home(homes: Mapping[str, _Home], worker: Worker) -> _Home | None:
    """Return the worker's own record, or one of its store that is older than the worker."""
    if worker.incarnation in homes or not worker.store:
        return homes.get(worker.incarnation)
    found = [
        home for home in homes.values() if home.store == worker.store and home.noted_at < worker.connected_at
    ]
    return max(found, key=lambda home: home.whole, default=None)


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """A worker with its load, as a routing candidate. `load_s`: seconds of work left for its flights."""

    worker: Worker
    speed: Throughput
    assigned: int
    load_s: float


@dataclass(frozen=True, slots=True)
class RouteScore:
    """Score of a candidate: `cost_s` of the request without a cache, and the prefix `overlap`."""

    worker_load: WorkerLoad
    cost_s: float
    overlap: PrefixOverlap

    @property
    def done_s(self) -> float:
        return self.worker_load.load_s + self.cost_s

    @property
    def excess(self) -> float:
        """Permitted excess load over the least-loaded worker, in requests."""
        return self.overlap.share * (EXCESS_REQUESTS if self.overlap.own else EXCESS_BEGUN_ALIKE)

    def ahead_of(self, other: RouteScore) -> float:
        """Return its number of requests beyond those of `other`, scaled to the same speed."""
        return (
            self.worker_load.assigned
            - other.worker_load.assigned * self.worker_load.speed.answer / other.worker_load.speed.answer
        )


def best(scores: Sequence[RouteScore]) -> RouteScore:
    """Return the best candidate by prefix overlap among those near the least-loaded one."""
    least = least_loaded(scores)
    within = [score for score in scores if score is least or _is_near(score, least)]
    return max(within, key=lambda score: (score.overlap.share, -score.done_s, -score.worker_load.assigned))


def least_loaded(scores: Sequence[RouteScore]) -> RouteScore:
    """Return the least-loaded candidate."""
    first = min(scores, key=_order)
    soon = [score for score in scores if score.done_s - first.done_s <= EXCESS_REQUESTS * first.cost_s]
    fewer = [score for score in soon if first.ahead_of(score) > EXCESS_REQUESTS]
    return min(fewer, key=_order, default=first)


def _order(score: RouteScore) -> tuple[float, int]:
    return score.done_s, score.worker_load.assigned


def _is_near(score: RouteScore, least: RouteScore) -> bool:
    is_soon = score.done_s - least.done_s <= score.excess * least.cost_s
    return is_soon and score.ahead_of(least) <= score.excess


class Routing:
    """Routing state of one gateway."""

    def __init__(self, clock: Callable[[], float], method: RoutingMethod = "affinity") -> None:
        """`method`: `load` ignores prefix affinity."""
        self.affinity = Affinity()
        self._clock = clock
        self._by_affinity = method == "affinity"
        self._answer_tokens = ANSWER_TOKENS
        self._shared_until: dict[str, float] = {}
        self._last: tuple[Request | None, PrefixHashes] = None, NONE

    # --- events ---

    def on_dispatched(self, flight: Flight, worker: Worker) -> None:
        """Record that the flight was dispatched to `worker`."""
        worker.dispatched += 1
        if flight.attempt is None or not self._is_shared(flight.model):
            return
        prompt = self._prefix_hashes(flight)
        flight.attempt.spared = self.affinity.overlap(prompt, worker).share
        self.affinity.note(prompt, worker, self._clock())

    def finished(self, flight: Flight, worker: Worker, end: Finished) -> None:
        """Update the worker's throughput and the mean answer length from a finished request."""
        if flight.attempts == 1 and not runs_nothing(flight.request):
            worker.throughput.observe(end)
            if isinstance(flight.request, Generate):
                self._answer_tokens = smoothed_length(self._answer_tokens, end)

    # --- the choice ---

    def worker_loads(self, workers: Sequence[tuple[Worker, Sequence[Flight]]]) -> list[WorkerLoad]:
        """Return the loads of workers of one model, given with their flights."""
        usual = usual_speed(worker.throughput for worker, _ in workers)
        found = []
        for worker, assigned in workers:
            speed = worker.throughput.speed(usual)
            found.append(
                WorkerLoad(worker, speed, len(assigned), left_s(assigned, speed, self._answer_tokens))
            )
        if len(found) > 1:
            self._shared_until[found[0].worker.model] = self._clock() + SHARED_S
        return found

    def choose_worker(self, request: Request, worker_loads: Sequence[WorkerLoad]) -> Worker:
        """Return the worker for a new request."""
        if len(worker_loads) == 1:
            return worker_loads[0].worker
        prompt = self._read(request)
        return best(
            [self._score(request, prompt, 0, worker_load) for worker_load in worker_loads]
        ).worker_load.worker

    def pick(self, flight: Flight, worker_loads: Sequence[WorkerLoad]) -> WorkerLoad:
        """Return the candidate for a waiting flight, and add the flight's cost to its load."""
        if len(worker_loads) == 1:
            return worker_loads[0]
        prompt = self._prefix_hashes(flight)
        tokens = flight.prompt_tokens + len(flight.tokens) if flight.prompt_tokens else 0
        score = best(
            [self._score(flight.request, prompt, tokens, worker_load) for worker_load in worker_loads]
        )
        score.worker_load.load_s += score.cost_s
        return score.worker_load

    def _score(
        self, request: Request, prompt: PrefixHashes, tokens: int, worker_load: WorkerLoad
    ) -> RouteScore:
        cost = cost_s(request, worker_load.speed, self._answer_tokens, prompt_tokens=tokens)
        return RouteScore(worker_load, cost, self.affinity.overlap(prompt, worker_load.worker))

    def _prefix_hashes(self, flight: Flight) -> PrefixHashes:
        """Return the prefix hashes of the flight's prompt, computed once."""
        if flight.prefix_hashes is None:
            flight.prefix_hashes = self._read(flight.request)
        return flight.prefix_hashes

    def _read(self, request: Request) -> PrefixHashes:
        if not self._by_affinity:
            return NONE
        if self._last[0] is not request:  # the request routed last is usually dispatched next
            self._last = request, prefix_hashes(request)
        return self._last[1]

    def _is_shared(self, model: str) -> bool:
        return self._shared_until.get(model, 0.0) > self._clock()
