"""Requests in flight. Pure: no sockets, no asyncio, the clock handed in.

A flight is opened when its request is admitted and closed when its client has what it wanted or is gone. In
between it collects what the worker says, in order, until the one terminal item. What must always hold:

* exactly one terminal item per flight (`Finished` or `Failed`), nothing after it;
* deltas are numbered 0, 1, 2…; a gap or a double fails the flight instead of corrupting its text;
* what was reused of its prompt is said once, after its acceptance and before its first delta;
* a flight listens to one incarnation of one worker; what others say about it is dropped;
* what waits for a client that does not read is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from protocol.errors import Code
from protocol.messages import Accepted, Delta, Failed, Finished, Generate, Reuse, Reused

PENDING_DELTAS_MAX = 16384

Item = Accepted | Reused | Delta | Finished | Failed
Batch = tuple[int, list[Item]]
"""What has come for one of a request's flights: its place among them, and the items."""


@dataclass(slots=True, eq=False)
class Flight:
    """One request in the air. `take` hands over what has arrived; `on_item` is called when something has."""

    request: Generate
    worker: str
    opened_at: float
    tokens_emitted: int = 0
    deltas: int = 0
    accepted: bool = False
    prompt_tokens: int = 0
    reuse: Reuse | None = None
    started_at: float | None = None
    terminal: Finished | Failed | None = None
    on_item: Callable[[], None] = lambda: None
    pending: list[Item] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.request.id

    def take(self) -> list[Item]:
        """Everything that arrived since the last call, in order; the terminal item comes last."""
        items, self.pending = self.pending, []
        return items

    def _push(self, item: Item) -> None:
        self.pending.append(item)
        self.on_item()

    def accept(self, message: Accepted) -> None:
        if self.terminal is None and not self.accepted:
            self.accepted = True
            self.prompt_tokens = message.prompt_tokens
            self._push(message)

    def reused(self, message: Reused) -> bool:
        """How much of the prompt need not be computed. False when this is not the time to say it."""
        if not self.accepted or self.reuse is not None or self.deltas or self.terminal is not None:
            return False
        self.reuse = message.reuse
        self._push(message)
        return True

    def gain(self, delta: Delta, now: float) -> bool:
        """One more delta. False when the flight failed over it and the worker should stop."""
        if self.terminal is not None:
            return False
        if delta.sequence != self.deltas:
            detail = f"delta {delta.sequence} came where {self.deltas} was due"
            self.fail(Code.INTERNAL_ERROR, f"The stream was damaged on its way: {detail}.")
            return False
        if len(self.pending) >= PENDING_DELTAS_MAX:
            self.fail(Code.CLIENT_TOO_SLOW)
            return False
        if self.started_at is None:
            self.started_at = now
        self.deltas += 1
        self.tokens_emitted += len(delta.tokens)
        self._push(delta)
        return True

    def end(self, terminal: Finished | Failed) -> bool:
        """The one place where a flight ends. False when it had ended already."""
        if self.terminal is not None:
            return False
        self.terminal = terminal
        self._push(terminal)
        return True

    def fail(self, code: Code, message: str = "") -> bool:
        """End with an error of the gateway's own."""
        return self.end(Failed(incarnation=self.worker, id=self.id, code=code, message=message))


class Flights:
    """All flights, by id and by the worker they are aboard."""

    def __init__(self) -> None:
        self._by_id: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._by_id.values()))

    def open(self, request: Generate, worker: str, now: float) -> Flight:
        if request.id in self._by_id:
            raise ValueError(f"flight {request.id} is open already")
        flight = Flight(request=request, worker=worker, opened_at=now)
        self._by_id[request.id] = flight
        return flight

    def close(self, flight: Flight) -> None:
        """Idempotent."""
        self._by_id.pop(flight.id, None)

    def find(self, id: str, worker: str) -> Flight | None:
        """The flight `worker` may speak about under this id."""
        flight = self._by_id.get(id)
        return flight if flight is not None and flight.worker == worker else None

    def aboard(self, worker: str) -> list[Flight]:
        """Flights of a worker that have not ended, oldest first."""
        return [f for f in self._by_id.values() if f.worker == worker and f.terminal is None]
