"""The gateway against simulated workers that die, hang, reconnect, repeat themselves and lie.

One rule is one thing that can happen; hypothesis strings them together. What workers say lies on the line
until it is delivered, also after they are dead, so that every order that ZeroMQ can produce comes about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.clearing import Clearing
from broker.fleet import Worker
from broker.inflight import PENDING_DELTAS_MAX, Flight, Item
from protocol.errors import Code, RequestError
from protocol.messages import (
    Cancel,
    ClearCache,
    Delta,
    Events,
    Failed,
    Finished,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Loading,
    Message,
    Rejected,
    Reused,
    ToGateway,
    Welcome,
)
from tests.broker.line import (
    SILENT_S,
    STALL_S,
    Line,
    accepted,
    cleared,
    failed,
    finished,
    ready,
    request,
    reused,
)

ROWS, WAITING = 2, 2
WORKERS_MAX = 4
TOKENS = 3
FORGED = "never said"


def text_at(worker: str, id: str, sequence: int) -> str:
    """What a worker says at a position: nobody else, of no other request, at no other place, says it."""
    return f"{worker}/{id}/{sequence} "


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
    steps: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    inbox: deque[Message] = field(default_factory=deque)
    line: deque[ToGateway] = field(default_factory=deque)
    said: set[str] = field(default_factory=set)
    """Requests it has truly ended."""

    def introduce(self) -> None:
        self.line.append(Hello(incarnation=self.name, version=1, model=self.model, pid=1))
        if self.loaded:
            self.line.append(ready(self.name, self.model, ROWS))
        else:
            self.line.append(Loading(incarnation=self.name, done=0, total=2))

    def work(self) -> None:
        """Take what has come, then make a step."""
        while self.inbox:
            match self.inbox.popleft():
                case Generate(id=id):
                    self.rows[id] = 0
                    self.line.append(accepted(self.name, id))
                    self.line.append(reused(self.name, id, TOKENS))
                case ClearCache(id=id):
                    self.line.append(cleared(self.name, id, 1))
                case Cancel(id=id):
                    self.rows.pop(id, None)
                case Welcome():
                    pass
                case Rejected():
                    raise AssertionError("it speaks our version")
        if self.rows:
            self.steps += 1
            deltas = [self.delta(id, sequence) for id, sequence in self.rows.items()]
            self.line.append(Events(incarnation=self.name, deltas=deltas))
        for id in list(self.rows):
            self.rows[id] += 1
            if self.rows[id] == TOKENS:
                self.end(id, finished(self.name, id, TOKENS))

    def delta(self, id: str, sequence: int) -> Delta:
        return Delta(id=id, sequence=sequence, tokens=[sequence], text=text_at(self.name, id, sequence))

    def end(self, id: str, how: Finished | Failed) -> None:
        del self.rows[id]
        self.said.add(id)
        self.line.append(how)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(incarnation=self.name, running=len(self.rows), waiting=0, steps=self.steps)


@dataclass(eq=False)
class Client:
    """One flight, and what its client has read of it. Those of one request share their context."""

    context: AbstractContextManager[list[Flight]]
    flight: Flight
    read: list[Item] = field(default_factory=list)

    def take(self) -> None:
        self.read += self.flight.take()

    @property
    def ended(self) -> bool:
        return bool(self.read) and isinstance(self.read[-1], Finished | Failed)


class SimulatedLine(Line):
    """A line whose other end is the peers."""

    def __init__(self, peers: dict[str, Peer]) -> None:
        super().__init__(waiting_max=WAITING)
        self.peers = peers

    def send(self, peer: str, message: Message, media: Sequence[bytes]) -> bool:
        super().send(peer, message, media)
        receiver = self.peers.get(peer)
        if receiver is None or receiver.full or (not receiver.alive and receiver.noticed):
            return False
        # The connection of one that has just died still takes what nobody will read.
        receiver.inbox.append(message)
        return True


class Gateway(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.peers: dict[str, Peer] = {}
        self.line = SimulatedLine(self.peers)
        self.dispatcher = self.line.dispatcher
        self.clients: list[Client] = []
        self.opened = 0
        self.orders: list[tuple[AbstractContextManager[Clearing], Clearing, set[str]]] = []

    def pick(self, number: int, peers: list[Peer]) -> Peer:
        return peers[number % len(peers)]

    def alive(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.alive]

    # --- workers ---

    @initialize()
    def two_workers_serve(self) -> None:
        for model in ("m1", "m2"):
            self.worker_comes(model, loaded=True)
            self.deliver(len(self.peers) - 1, 2)

    @precondition(lambda self: len(self.alive()) < WORKERS_MAX)
    @rule(model=st.sampled_from(["m1", "m2"]), loaded=st.booleans())
    def worker_comes(self, model: str, loaded: bool) -> None:
        peer = Peer(f"w{len(self.peers)}", model, loaded=loaded)
        self.peers[peer.name] = peer
        peer.introduce()

    @precondition(lambda self: self.alive())
    @rule(number=st.integers(0, 99))
    def worker_has_loaded(self, number: int) -> None:
        peer = self.pick(number, self.alive())
        peer.loaded = True
        peer.line.append(ready(peer.name, peer.model, ROWS))

    @precondition(lambda self: self.alive())
    @rule(number=st.integers(0, 99), steps=st.integers(1, TOKENS + 1))
    def worker_works(self, number: int, steps: int) -> None:
        peer = self.pick(number, self.alive())
        for _ in range(0 if peer.hung else steps):
            peer.work()

    @precondition(lambda self: self.alive())
    @rule(number=st.integers(0, 99))
    def worker_beats(self, number: int) -> None:
        peer = self.pick(number, self.alive())
        peer.line.append(peer.heartbeat())

    @precondition(lambda self: self.alive())
    @rule(number=st.integers(0, 99))
    def worker_hangs_or_recovers(self, number: int) -> None:
        peer = self.pick(number, self.alive())
        peer.hung = not peer.hung

    @precondition(lambda self: self.alive())
    @rule(number=st.integers(0, 99))
    def workers_queue_fills_or_empties(self, number: int) -> None:
        peer = self.pick(number, self.alive())
        peer.full = not peer.full

    @precondition(lambda self: any(peer.rows for peer in self.alive()))
    @rule(number=st.integers(0, 99), code=st.sampled_from(["engine_error", "a_later_code"]))
    def worker_fails_a_row(self, number: int, code: str) -> None:
        peer = self.pick(number, [peer for peer in self.alive() if peer.rows])
        id = list(peer.rows)[number % len(peer.rows)]
        peer.end(id, failed(peer.name, id, code))

    @precondition(lambda self: self.alive())
    @rule(number=st.integers(0, 99), says_goodbye=st.booleans())
    def worker_dies(self, number: int, says_goodbye: bool) -> None:
        peer = self.pick(number, self.alive())
        if says_goodbye:
            peer.line.append(Goodbye(incarnation=peer.name, reason="asked to stop"))
        peer.alive = False

    @precondition(lambda self: any(not peer.alive and not peer.noticed for peer in self.peers.values()))
    @rule(number=st.integers(0, 99))
    def death_is_noticed(self, number: int) -> None:
        dead = [peer for peer in self.peers.values() if not peer.alive and not peer.noticed]
        self.notice(self.pick(number, dead))

    def notice(self, peer: Peer) -> None:
        peer.noticed = True
        self.dispatcher.lost(peer.name)

    @precondition(lambda self: self.alive())
    @rule(number=st.integers(0, 99))
    def worker_reconnects_before_anyone_notices(self, number: int) -> None:
        peer = self.pick(number, self.alive())
        peer.rows.clear()
        peer.inbox.clear()
        peer.introduce()

    @precondition(lambda self: self.alive())
    @rule(number=st.integers(0, 99))
    def a_living_worker_is_taken_for_dead(self, number: int) -> None:
        self.dispatcher.lost(self.pick(number, self.alive()).name)

    # --- the line ---

    @precondition(lambda self: any(peer.line for peer in self.peers.values()))
    @rule(number=st.integers(0, 99), most=st.integers(1, 12))
    def deliver(self, number: int, most: int) -> None:
        peer = self.pick(number, list(self.peers.values()))
        for _ in range(min(most, len(peer.line))):
            self.dispatcher.hear(peer.name, peer.line.popleft())

    @precondition(lambda self: self.clients)
    @rule(
        number=st.integers(0, 99), kind=st.sampled_from(["delta", "finished", "failed", "accepted", "reused"])
    )
    def somebody_else_speaks_of_a_flight(self, number: int, kind: str) -> None:
        """Under its own name, and under that of the flight's worker."""
        flight = self.clients[number % len(self.clients)].flight
        others = [name for name in [*self.peers, "stranger"] if name != flight.worker]
        for signature in (other := others[number % len(others)], flight.worker):
            message: ToGateway
            match kind:
                case "delta":
                    delta = Delta(id=flight.id, sequence=flight.deltas, tokens=[1], text=FORGED)
                    message = Events(incarnation=signature, deltas=[delta])
                case "finished":
                    message = finished(signature, flight.id)
                case "failed":
                    message = failed(signature, flight.id, FORGED)
                case "reused":
                    message = reused(signature, flight.id, 1, FORGED)
                case _:
                    message = accepted(signature, flight.id)
            self.dispatcher.hear(other, message)

    @precondition(lambda self: self.clients)
    @rule(number=st.integers(0, 99), offset=st.sampled_from([-1, 1, 2]))
    def worker_skips_or_repeats_a_delta(self, number: int, offset: int) -> None:
        """True text in a wrong place."""
        flight = self.clients[number % len(self.clients)].flight
        peer, sequence = self.peers[flight.worker], max(0, flight.deltas + offset)
        self.dispatcher.hear(
            peer.name, Events(incarnation=peer.name, deltas=[peer.delta(flight.id, sequence)])
        )

    @precondition(lambda self: self.opened)
    @rule(number=st.integers(0, 99), id=st.integers(1, 60))
    def worker_ends_a_request_twice(self, number: int, id: int) -> None:
        """One that is running, is over, or never was aboard."""
        peer = self.pick(number, list(self.peers.values()))
        if f"r{id}" in peer.said:
            peer.line.append(failed(peer.name, f"r{id}", "engine_error"))
            peer.line.append(Events(incarnation=peer.name, deltas=[peer.delta(f"r{id}", TOKENS)]))

    # --- time ---

    @rule(seconds=st.sampled_from([0.25, SILENT_S + 0.1, STALL_S + 0.1]))
    def time_passes(self, seconds: float) -> None:
        self.line.clock.now += seconds
        self.dispatcher.sweep()

    @rule(seconds=st.sampled_from([2, STALL_S + 2]))
    def time_passes_while_workers_beat(self, seconds: int) -> None:
        for _ in range(int(seconds)):
            self.line.clock.now += 1.0
            for peer in self.alive():
                peer.steps += 0 if peer.hung else 1
                self.dispatcher.hear(peer.name, peer.heartbeat())
            self.dispatcher.sweep()

    # --- clients ---

    @rule(model=st.sampled_from(["m1", "m1", "m2", None]), times=st.integers(1, 3), choices=st.integers(1, 3))
    def clients_come(self, model: str | None, times: int, choices: int) -> None:
        for _ in range(times):
            self.open(model, choices)

    def open(self, model: str | None, choices: int) -> None:
        try:
            worker = self.dispatcher.find(model)
        except RequestError as error:
            refused = error.code
        else:
            assert model in (None, worker.model)
            self.board(worker, choices)
            return
        assert refused in {Code.WORKER_UNAVAILABLE, Code.MODEL_LOADING, Code.SHUTTING_DOWN}

    def board(self, worker: Worker, choices: int) -> None:
        full = len(self.dispatcher.flights.aboard(worker.incarnation)) + choices > ROWS + WAITING
        requests = [request(f"r{self.opened + number}") for number in range(1, choices + 1)]
        self.opened += choices
        context = self.dispatcher.board(worker, requests, ())
        try:
            flights = context.__enter__()
        except RequestError as error:
            refused = error.code
        else:
            assert not full
            self.clients += [Client(context, flight) for flight in flights]
            return
        assert full or not self.reachable(worker.incarnation)
        assert refused is (Code.TEXT_GENERATION_BUSY if full else Code.WORKER_UNAVAILABLE)

    def reachable(self, name: str) -> bool:
        peer = self.peers[name]
        return not peer.full and not peer.noticed

    @precondition(lambda self: self.clients)
    @rule(number=st.integers(0, 99))
    def client_reads(self, number: int) -> None:
        self.clients[number % len(self.clients)].take()

    @precondition(lambda self: self.clients)
    @rule(number=st.integers(0, 99))
    def client_leaves(self, number: int) -> None:
        self.leave(self.clients[number % len(self.clients)])

    def leave(self, one: Client) -> None:
        party = [client for client in self.clients if client.context is one.context]
        running = [(c.flight.worker, c.flight.id) for c in party if c.flight.terminal is None]
        self.line.sent.clear()
        one.context.__exit__(None, None, None)
        for client in party:
            self.clients.remove(client)
            client.take()
            self.check(client)
        told = [(to, message.id) for to, message in self.line.sent if isinstance(message, Cancel)]
        assert told == running

    # --- operators ---

    @precondition(lambda self: len(self.orders) < 3)
    @rule(model=st.sampled_from(["m1", "m2", None]))
    def operator_clears(self, model: str | None) -> None:
        self.opened += 1
        context = self.dispatcher.clear(model, f"c{self.opened}")
        try:
            order = context.__enter__()
        except RequestError:
            return
        assert order.awaited
        assert model is None or set(order.awaited.values()) == {model}
        self.orders.append((context, order, set(order.awaited)))

    @precondition(lambda self: self.orders)
    @rule(number=st.integers(0, 9))
    def operator_has_waited(self, number: int) -> None:
        context, order, asked = self.orders.pop(number % len(self.orders))
        answered = {message.incarnation for _, message in order.freed}
        assert len(answered) == len(order.freed)
        lost = asked - answered - order.awaited.keys()
        assert bool(lost) == (order.died is not None)
        context.__exit__(None, None, None)

    # --- the gateway's own end ---

    @rule(dice=st.integers(0, 29))
    def gateway_goes(self, dice: int) -> None:
        if dice == 0:
            self.dispatcher.stop()
        elif dice == 1 and self.dispatcher.stopping:
            self.dispatcher.abandon()
            assert all(client.flight.terminal is not None for client in self.clients)

    # --- what must always hold ---

    @invariant()
    def every_open_request_is_a_flight_and_no_other(self) -> None:
        assert list(self.dispatcher.flights) == [client.flight for client in self.clients]

    @invariant()
    def no_worker_has_more_aboard_than_it_may(self) -> None:
        for name in self.peers:
            assert len(self.dispatcher.flights.aboard(name)) <= ROWS + WAITING

    @invariant()
    def flights_are_sound(self) -> None:
        for client in self.clients:
            assert len(client.flight.pending) <= PENDING_DELTAS_MAX + 2
            self.check(client)

    def check(self, client: Client) -> None:
        flight, items = client.flight, [*client.read, *client.flight.pending]
        texts = [item.text for item in items if isinstance(item, Delta)]
        # Nothing lost, doubled or out of order, and nothing of another flight, worker or liar.
        assert texts == [text_at(flight.worker, flight.id, n) for n in range(len(texts))]
        told = [item.reuse for item in items if isinstance(item, Reused)]
        assert told == ([flight.reuse] if flight.reuse is not None else [])
        assert FORGED not in [reuse.tier for reuse in told]
        ends = [item for item in items if isinstance(item, Finished | Failed)]
        assert len(ends) == (flight.terminal is not None)
        if ends:
            assert items[-1] is ends[0] is flight.terminal
        match flight.terminal:
            case Finished():
                assert flight.id in self.peers[flight.worker].said
                assert len(texts) == TOKENS
            case Failed(code=code):
                assert code != FORGED

    def teardown(self) -> None:
        """However it went: once the line is empty and the clock has run, everyone has an answer."""
        for peer in list(self.peers.values()):
            if not peer.alive:
                self.notice(peer)
            elif not peer.hung:
                for _ in range(TOKENS + 1):
                    peer.work()
            while peer.line:
                self.dispatcher.hear(peer.name, peer.line.popleft())
        for client in self.clients:
            assert client.flight.terminal is not None or self.peers[client.flight.worker].hung
        self.line.clock.now += SILENT_S + STALL_S
        self.dispatcher.sweep()
        for client in self.clients:
            client.take()
            assert client.ended, f"{client.flight.id} hangs"
        while self.clients:
            self.leave(self.clients[0])
        assert len(self.dispatcher.flights) == 0


Gateway.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

test_whatever_workers_and_clients_do_every_request_ends_once_and_whole = Gateway.TestCase
