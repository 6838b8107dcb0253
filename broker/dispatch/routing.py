"""Which of several workers a request goes to. Pure.

The *least loaded* is the one that would be done with it first, had nobody anything stored, unless it has
`EXCESS_REQUESTS` more than another (for its speed) that would be done about as soon. Another one that has run
the beginning of its prompt gets it all the same, if it is not much busier: the more of the prompt it has, the
more it may have to do, up to `EXCESS_REQUESTS` requests beyond the least loaded (for its speed), and up to as
many times what this one costs; up to one where it has only what both begin with. So conversations stay where
they are, what all of them begin with is soon everywhere, and a flood on one prompt spreads.

A model that has had one worker for a while costs nothing here: no prompt of it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from broker.dispatch.affinity import Affinity, Known
from broker.dispatch.beginnings import NONE, Beginnings, beginnings
from broker.dispatch.fleet import Worker
from broker.dispatch.flight import Flight
from broker.dispatch.workload import ANSWER_TOKENS, Speed, cost_s, left_s, smoothed_length, usual_speed
from protocol.messages import Finished, Generate, Request
from protocol.tasks import runs_nothing

EXCESS_REQUESTS = 4
EXCESS_BEGUN_ALIKE = 1
SHARED_S = 600.0
"""So long after a model had several workers its prompts are looked at still: one may be back soon."""

Method = Literal["affinity", "load"]


@dataclass(slots=True, eq=False)
class Desk:
    """A worker that could take a request. `load_s`: what those aboard still cost it."""

    worker: Worker
    speed: Speed
    aboard: int
    load_s: float


@dataclass(frozen=True, slots=True)
class Bid:
    """What a request means for a worker: `cost_s`, were nothing stored; what is `known` of its prompt."""

    desk: Desk
    cost_s: float
    known: Known

    @property
    def done_s(self) -> float:
        return self.desk.load_s + self.cost_s

    @property
    def excess(self) -> float:
        """So many requests more than the least loaded it may have."""
        return self.known.share * (EXCESS_REQUESTS if self.known.own else EXCESS_BEGUN_ALIKE)

    def ahead_of(self, other: Bid) -> float:
        """How many requests more it has than the other one would, were that one as fast."""
        return self.desk.aboard - other.desk.aboard * self.desk.speed.answer / other.desk.speed.answer


def best(bids: Sequence[Bid]) -> Bid:
    """The one it goes to."""
    least = least_loaded(bids)
    within = [bid for bid in bids if bid is least or _is_near(bid, least)]
    return max(within, key=lambda bid: (bid.known.share, -bid.done_s, -bid.desk.aboard))


def least_loaded(bids: Sequence[Bid]) -> Bid:
    """The one that has least to do."""
    first = min(bids, key=_order)
    soon = [bid for bid in bids if bid.done_s - first.done_s <= EXCESS_REQUESTS * first.cost_s]
    fewer = [bid for bid in soon if first.ahead_of(bid) > EXCESS_REQUESTS]
    return min(fewer, key=_order, default=first)


def _order(bid: Bid) -> tuple[float, int]:
    return bid.done_s, bid.desk.aboard


def _is_near(bid: Bid, least: Bid) -> bool:
    is_soon = bid.done_s - least.done_s <= bid.excess * least.cost_s
    return is_soon and bid.ahead_of(least) <= bid.excess


class Routing:
    """One per gateway."""

    def __init__(self, clock: Callable[[], float], method: Method = "affinity") -> None:
        """`load`: as if nobody had anything stored."""
        self.affinity = Affinity()
        self._clock = clock
        self._by_affinity = method == "affinity"
        self._answer_tokens = ANSWER_TOKENS
        self._shared_until: dict[str, float] = {}
        self._last: tuple[Request | None, Beginnings] = None, NONE

    # --- what happens ---

    def boarded(self, flight: Flight, worker: Worker) -> None:
        """It has a leg with this worker."""
        worker.boarded += 1
        if flight.leg is None or not self._is_shared(flight.model):
            return
        prompt = self._beginnings(flight)
        flight.leg.spared = self.affinity.known(prompt, worker).share
        self.affinity.note(prompt, worker, self._clock())

    def finished(self, flight: Flight, worker: Worker, end: Finished) -> None:
        """What its end tells of how fast this worker is, and of how long answers are."""
        if flight.legs == 1 and not runs_nothing(flight.request):
            worker.pace.observe(end)
            if isinstance(flight.request, Generate):
                self._answer_tokens = smoothed_length(self._answer_tokens, end)

    # --- the choice ---

    def desks(self, workers: Sequence[tuple[Worker, Sequence[Flight]]]) -> list[Desk]:
        """Of workers of one model, and who is aboard of them."""
        usual = usual_speed(worker.pace for worker, _ in workers)
        found = []
        for worker, aboard in workers:
            speed = worker.pace.speed(usual)
            found.append(Desk(worker, speed, len(aboard), left_s(aboard, speed, self._answer_tokens)))
        if len(found) > 1:
            self._shared_until[found[0].worker.model] = self._clock() + SHARED_S
        return found

    def newcomer(self, request: Request, desks: Sequence[Desk]) -> Worker:
        """Where a new request goes."""
        if len(desks) == 1:
            return desks[0].worker
        prompt = self._read(request)
        return best([self._bid(request, prompt, 0, desk) for desk in desks]).desk.worker

    def pick(self, flight: Flight, desks: Sequence[Desk]) -> Desk:
        """Where one that waits goes; it is counted there from now on."""
        if len(desks) == 1:
            return desks[0]
        prompt = self._beginnings(flight)
        tokens = flight.prompt_tokens + len(flight.tokens) if flight.prompt_tokens else 0
        bid = best([self._bid(flight.request, prompt, tokens, desk) for desk in desks])
        bid.desk.load_s += bid.cost_s
        return bid.desk

    def _bid(self, request: Request, prompt: Beginnings, tokens: int, desk: Desk) -> Bid:
        cost = cost_s(request, desk.speed, self._answer_tokens, prompt_tokens=tokens)
        return Bid(desk, cost, self.affinity.known(prompt, desk.worker))

    def _beginnings(self, flight: Flight) -> Beginnings:
        """Of its prompt, which are taken once."""
        if flight.beginnings is None:
            flight.beginnings = self._read(flight.request)
        return flight.beginnings

    def _read(self, request: Request) -> Beginnings:
        if not self._by_affinity:
            return NONE
        if self._last[0] is not request:  # who is chosen a worker for is the next to board it
            self._last = request, beginnings(request)
        return self._last[1]

    def _is_shared(self, model: str) -> bool:
        return self._shared_until.get(model, 0.0) > self._clock()
