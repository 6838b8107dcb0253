"""Simulated workers, and their connection to a dispatcher."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.dispatch.failover import CRASHES_MAX
from protocol.messages import (
    Accepted,
    Adopt,
    Cancel,
    ClearCache,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Loading,
    Message,
    PrefixHit,
    PromptLogprobs,
    StepOutputs,
    ToGateway,
    Welcome,
)
from protocol.types import AdoptedRow, Delta, OrphanedRow, RequestStatus
from tests.broker.dispatcher_line import Clock, Line, ready
from tests.factories import GATEWAY, accepted, cleared, finished, reused

ROWS, WAITING = 3, 3
TOKENS = 5
POISON = "p"
"""Id prefix of requests that kill their worker at the token `POISON_AT`."""
POISON_AT = 2


def text_at(id: str, position: int) -> str:
    """Return the text of an answer's position, unique to request and position."""
    return f"{id.partition('~')[0]}/{position} "


def of_flights(message: Message) -> bool:
    """Return whether the simulated connection may lose, duplicate or swap the message."""
    return isinstance(
        message, Generate | Cancel | Accepted | PrefixHit | PromptLogprobs | StepOutputs | Finished | Failed
    )


def lacks(adopted: AdoptedRow, message: Message) -> bool:
    """Return whether a gateway that adopts a row lacks this message about it."""
    match message:
        case Accepted():
            return not adopted.accepted
        case PrefixHit():
            return not adopted.reused
        case StepOutputs(deltas=[delta]):
            return delta.sequence >= adopted.deltas
    return True


@dataclass(eq=False)
class Peer:
    """Incarnation of a worker process, correct unless a rule makes it faulty."""

    name: str
    model: str
    alive: bool = True
    noticed: bool = False
    full: bool = False
    hung: bool = False
    loaded: bool = False
    welcome_due: bool = False
    steps: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    """Tokens of each request, including those that it was resumed with."""
    resumed: dict[str, int] = field(default_factory=dict)
    inbox: deque[Message] = field(default_factory=deque)
    line: deque[ToGateway] = field(default_factory=deque)
    said: set[str] = field(default_factory=set)
    """Ids of the requests that it has ended."""
    made: dict[str, list[ToGateway]] = field(default_factory=dict)
    """All messages of each request, which it can send again."""
    is_muted: bool = False
    """Whether it waits to hear which of its requests are adopted."""
    computed: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often it has made each token of each request."""

    def reconnect(self, *, keeps: bool) -> None:
        """Connect again. `keeps`: with its requests."""
        self.inbox.clear()
        if not keeps:
            self.rows.clear()
            self.made.clear()
        self.introduce()

    def introduce(self) -> None:
        self.welcome_due = True
        rows = [OrphanedRow(id=id, deltas=self.deltas_of(id), whole=True) for id in self.made]
        self.is_muted = bool(rows)
        self.line.append(Hello(incarnation=self.name, version=1, model=self.model, pid=1, rows=rows))
        if self.loaded:
            self.line.append(ready(self.name, self.model, ROWS))
        else:
            self.line.append(Loading(incarnation=self.name, done=0, total=2))

    def work(self) -> None:
        """Process the received messages, then make a step."""
        while self.inbox:
            self.obey(self.inbox.popleft())
        self.step()

    def deltas_of(self, id: str) -> int:
        return sum(isinstance(message, StepOutputs) for message in self.made[id])

    def tell(self, id: str, message: ToGateway) -> None:
        """Send a message about a request, unless it is to be adopted first."""
        self.made.setdefault(id, []).append(message)
        if not self.is_muted:
            self.line.append(message)

    def adopt(self, adopted: dict[str, AdoptedRow]) -> None:
        self.is_muted = False
        for id in [*self.made]:
            if id in adopted:
                self.line += [message for message in self.made[id] if lacks(adopted[id], message)]
            else:
                self.rows.pop(id, None)
                del self.made[id]

    def obey(self, message: Message) -> None:
        match message:
            case Generate(id=id, resume=resume):
                if self.is_muted:  # the gateway's reply was lost
                    self.adopt({})
                assert resume == list(range(len(resume)))
                self.rows[id] = self.resumed[id] = len(resume)
                self.tell(id, accepted(self.name, id))
                self.tell(id, reused(self.name, id, TOKENS))
            case Adopt(rows=rows):
                self.adopt({row.id: row for row in rows})
            case ClearCache(id=id):
                self.line.append(cleared(self.name, id, 1))
            case Cancel(id=id):
                self.rows.pop(id, None)
                self.made.pop(id, None)
            case Welcome() if self.welcome_due:
                self.welcome_due = False
            case Welcome():
                self.introduce()  # the gateway does not know it any more
            case _:
                raise AssertionError("unexpected message")

    def step(self) -> None:
        if any(id.startswith(POISON) and position >= POISON_AT for id, position in self.rows.items()):
            self.alive = False
            return
        ended = [id for id, position in self.rows.items() if position == TOKENS]
        going = {id: position for id, position in self.rows.items() if position < TOKENS}
        if going:
            self.steps += 1
        for id, position in going.items():
            delta = self.delta(id, position - self.resumed[id])
            self.tell(id, StepOutputs(incarnation=self.name, deltas=[delta]))
            self.computed[id.partition("~")[0], position] += 1
        for id in going:
            self.rows[id] += 1
        for id in [*ended, *(id for id in going if self.rows[id] == TOKENS)]:
            self.end(id, finished(self.name, id, TOKENS))

    def delta(self, id: str, sequence: int) -> Delta:
        position = self.resumed[id] + sequence
        return Delta(id=id, sequence=sequence, tokens=[position], text=text_at(id, position))

    def end(self, id: str, how: Finished | Failed) -> None:
        del self.rows[id]
        self.said.add(id)
        self.tell(id, how)

    def heartbeat(self) -> Heartbeat:
        rows = [RequestStatus(id=id, phase="decode", prompt_tokens=3) for id in self.rows]
        return Heartbeat(
            incarnation=self.name, running=len(self.rows), waiting=0, steps=self.steps, rows=rows
        )


class SimulatedLine(Line):
    """Dispatcher connected to simulated workers."""

    def __init__(
        self, peers: dict[str, Peer], *, incarnation: str = GATEWAY, clock: Clock | None = None
    ) -> None:
        super().__init__(waiting_max=WAITING, incarnation=incarnation, clock=clock)
        self.peers = peers

    def send(self, peer: str, message: Message, media: Sequence[bytes]) -> bool:
        super().send(peer, message, media)
        if isinstance(message, Generate):
            self._check_company(peer, message)
        receiver = self.peers.get(peer)
        if receiver is None or receiver.full or (not receiver.alive and receiver.noticed):
            return False
        # The connection of a worker that has just died still accepts messages.
        receiver.inbox.append(message)
        return True

    def _check_company(self, peer: str, message: Generate) -> None:
        """Assert that a worker gets requests of its model, and one to be isolated alone."""
        flights = self.dispatcher.flights
        flight = flights.find(message.id, peer)
        assert flight is not None
        assert flight.model == self.peers[peer].model
        assert flight.crash_count < CRASHES_MAX
        if flight.is_suspect:
            others = [other for other in flights.assigned(peer) if other.group != flight.group]
            assert all(other.proven for other in others)
