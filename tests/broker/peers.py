"""Simulated workers, and the line that joins a dispatcher to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.dispatch.suspects import Standing, mark_of
from protocol.messages import (
    Accepted,
    Cancel,
    ClearCache,
    Events,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Loading,
    Message,
    Reused,
    Scored,
    ToGateway,
    Welcome,
)
from protocol.parts import Delta, RowStatus
from tests.broker.dispatching import Line, accepted, cleared, finished, ready, reused

ROWS, WAITING = 3, 3
TOKENS = 5
POISON = "p"
"""How the ids of requests begin that kill their worker over the token `POISON_AT`."""
POISON_AT = 2


def text_at(id: str, position: int) -> str:
    """What every honest worker says at a position of an answer, and at no other place of any other."""
    return f"{id.partition('~')[0]}/{position} "


def of_flights(message: Message) -> bool:
    """Is it one that the line may lose, double or swap? Others are the business of ZeroMQ alone."""
    return isinstance(message, Generate | Cancel | Accepted | Reused | Scored | Events | Finished | Failed)


@dataclass(eq=False)
class Peer:
    """One incarnation of a worker process, as honest as the real one unless a rule says otherwise."""

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
    """Tokens of each, those that it was resumed with among them."""
    resumed: dict[str, int] = field(default_factory=dict)
    inbox: deque[Message] = field(default_factory=deque)
    line: deque[ToGateway] = field(default_factory=deque)
    said: set[str] = field(default_factory=set)
    """Requests it has truly ended."""

    def introduce(self) -> None:
        self.welcome_due = True
        self.line.append(Hello(incarnation=self.name, version=1, model=self.model, pid=1))
        if self.loaded:
            self.line.append(ready(self.name, self.model, ROWS))
        else:
            self.line.append(Loading(incarnation=self.name, done=0, total=2))

    def work(self) -> None:
        """Take what has come, then make a step."""
        while self.inbox:
            self.obey(self.inbox.popleft())
        self.step()

    def obey(self, message: Message) -> None:
        match message:
            case Generate(id=id, resume=resume):
                assert resume == list(range(len(resume)))
                self.rows[id] = self.resumed[id] = len(resume)
                self.line.append(accepted(self.name, id))
                self.line.append(reused(self.name, id, TOKENS))
            case ClearCache(id=id):
                self.line.append(cleared(self.name, id, 1))
            case Cancel(id=id):
                self.rows.pop(id, None)
            case Welcome() if self.welcome_due:
                self.welcome_due = False
            case Welcome():
                self.introduce()  # the gateway has forgotten it
            case _:
                raise AssertionError("it speaks our version")

    def step(self) -> None:
        if any(id.startswith(POISON) and position >= POISON_AT for id, position in self.rows.items()):
            self.alive = False
            return
        ended = [id for id, position in self.rows.items() if position == TOKENS]
        going = {id: position for id, position in self.rows.items() if position < TOKENS}
        if going:
            self.steps += 1
            deltas = [self.delta(id, position - self.resumed[id]) for id, position in going.items()]
            self.line.append(Events(incarnation=self.name, deltas=deltas))
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
        self.line.append(how)

    def heartbeat(self) -> Heartbeat:
        rows = [RowStatus(id=id, phase="decode", prompt_tokens=3) for id in self.rows]
        return Heartbeat(
            incarnation=self.name, running=len(self.rows), waiting=0, steps=self.steps, rows=rows
        )


class SimulatedLine(Line):
    """A line whose other end is the peers."""

    def __init__(self, peers: dict[str, Peer]) -> None:
        super().__init__(waiting_max=WAITING)
        self.peers = peers

    def send(self, peer: str, message: Message, media: Sequence[bytes]) -> bool:
        super().send(peer, message, media)
        if isinstance(message, Generate):
            self._check_company(peer, message)
        receiver = self.peers.get(peer)
        if receiver is None or receiver.full or (not receiver.alive and receiver.noticed):
            return False
        # The connection of one that has just died still takes what nobody will read.
        receiver.inbox.append(message)
        return True

    def _check_company(self, peer: str, message: Generate) -> None:
        """Who is tried for the last time is tried alone."""
        flights, standing = self.dispatcher.flights, self.dispatcher.failover.suspects.standing
        flight = flights.find(message.id, peer)
        assert flight is not None
        assert standing(flight) is not Standing.HELD
        others = [other for other in flights.aboard(peer) if other is not flight]
        if standing(flight) is Standing.ALONE and mark_of(flight) not in map(mark_of, others):
            assert all(other.proven for other in others)
