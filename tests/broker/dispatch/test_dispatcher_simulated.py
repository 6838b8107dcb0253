"""Simulation of the gateway with workers that die, hang, reconnect, repeat themselves and lie.

A history is determined by its seed, which draws events with their weights. Messages of workers are queued
until delivered, also after the worker has died, so every order that ZeroMQ can produce occurs. The queue also
loses, duplicates and swaps messages, which ZeroMQ is not known to do.

`python -m tests.broker.dispatch.test_dispatcher_simulated 0 10000` plays the seeds 0 to 9999.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from broker.dispatch.cache_clear import CacheClear
from broker.dispatch.fleet import Worker
from broker.dispatch.flight import PENDING_DELTAS_MAX, Flight, Item
from protocol.errors import Code, RequestError
from protocol.messages import Cancel, Failed, Finished, Goodbye, Message, PrefixHit, StepOutputs, ToGateway
from protocol.types import Delta
from tests.broker.dispatcher_line import SILENT_S, STALL_S, ready
from tests.broker.peers import POISON, ROWS, TOKENS, WAITING, Peer, SimulatedLine, of_flights, text_at
from tests.factories import accepted, failed, finished, request, reused

WORKERS_MAX = 4
ROUNDS_MAX = 400
ROUNDS_AFTER = 12
SEEDS = 40
FORGED = "never said"
POSSIBLE = {"engine_error", "a_later_code"} | {
    code.value
    for code in (Code.WORKER_UNAVAILABLE, Code.WORKER_CRASHED, Code.INTERNAL_ERROR, Code.SHUTTING_DOWN)
}


@dataclass(eq=False)
class Client:
    """Client of one flight, with the items it has read. Flights of one request share their context."""

    context: AbstractContextManager[list[Flight]]
    flight: Flight
    read: list[Item] = field(default_factory=list)

    def take(self) -> None:
        self.read += self.flight.take()

    @property
    def ended(self) -> bool:
        return bool(self.read) and isinstance(self.read[-1], Finished | Failed)


def is_poison(client: Client) -> bool:
    return client.flight.id.startswith(POISON)


class Gateway:
    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        self.line = SimulatedLine(self.peers)
        self.dispatcher = self.line.dispatcher
        self.clients: list[Client] = []
        self.opened = 0
        self.ends: Counter[str] = Counter()
        self.orders: list[tuple[AbstractContextManager[CacheClear], CacheClear, set[str]]] = []

    def pick(self, number: int, peers: list[Peer]) -> Peer:
        return peers[number % len(peers)]

    def alive(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.alive]

    # --- workers ---

    def two_workers_serve(self) -> None:
        for model in ("m1", "m2"):
            self.worker_comes(model, loaded=True)
            self.deliver(len(self.peers) - 1, 2)

    def worker_comes(self, model: str, loaded: bool) -> None:
        peer = Peer(f"w{len(self.peers)}", model, loaded=loaded)
        self.peers[peer.name] = peer
        peer.introduce()

    def worker_has_loaded(self, number: int) -> None:
        peer = self.pick(number, self.alive())
        peer.loaded = True
        peer.line.append(ready(peer.name, peer.model, ROWS))

    def worker_works(self, number: int, steps: int) -> None:
        peer = self.pick(number, self.alive())
        for _ in range(0 if peer.hung else steps):
            peer.work()

    def worker_beats(self, number: int) -> None:
        peer = self.pick(number, self.alive())
        peer.line.append(peer.heartbeat())

    def worker_hangs_or_recovers(self, number: int) -> None:
        peer = self.pick(number, self.alive())
        peer.hung = not peer.hung

    def workers_queue_fills_or_empties(self, number: int) -> None:
        peer = self.pick(number, self.alive())
        peer.full = not peer.full

    def worker_fails_a_row(self, number: int, code: str) -> None:
        peer = self.pick(number, self.at_work())
        id = list(peer.rows)[number % len(peer.rows)]
        peer.end(id, failed(peer.name, id, code))

    def worker_dies(self, number: int, says_goodbye: bool) -> None:
        peer = self.pick(number, self.alive())
        if says_goodbye:
            peer.line.append(Goodbye(incarnation=peer.name, reason="asked to stop"))
        peer.alive = False

    def at_work(self) -> list[Peer]:
        return [peer for peer in self.alive() if peer.rows]

    def unnoticed(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if not peer.alive and not peer.noticed]

    def death_is_noticed(self, number: int) -> None:
        self.notice(self.pick(number, self.unnoticed()))

    def notice(self, peer: Peer) -> None:
        peer.noticed = True
        self.dispatcher.lost(peer.name)

    def worker_reconnects(self, number: int, keeps: bool, is_noticed: bool) -> None:
        """A worker loses its connection, and its requests or not, before the gateway notices or after."""
        peer = self.pick(number, self.alive())
        if is_noticed:
            self.dispatcher.lost(peer.name)
        peer.reconnect(keeps=keeps)

    def a_living_worker_is_taken_for_dead(self, number: int) -> None:
        self.dispatcher.lost(self.pick(number, self.alive()).name)

    # --- the line ---

    def deliver(self, number: int, most: int) -> None:
        peer = self.pick(number, list(self.peers.values()))
        for _ in range(min(most, len(peer.line))):
            self.dispatcher.on_message(peer.name, peer.line.popleft())

    def something_happens(self, number: int, how: str) -> None:
        """Lose, duplicate or swap a message in transit."""
        lines = [line for peer in self.peers.values() for line in (peer.line, peer.inbox)]
        places = [(line, n) for line in lines for n, message in enumerate(line) if of_flights(message)]
        line, place = places[number % len(places)]
        match how:
            case "lost":
                del line[place]
            case "doubled":
                line.insert(place, line[place])
            case _ if place + 1 < len(line) and of_flights(line[place + 1]):
                line[place], line[place + 1] = line[place + 1], line[place]

    def under_way(self) -> list[Message]:
        messages = [message for peer in self.peers.values() for message in (*peer.line, *peer.inbox)]
        return [message for message in messages if of_flights(message)]

    def somebody_else_speaks_of_a_flight(self, number: int, kind: int) -> None:
        """Another peer forges messages, under its own name and under that of the flight's worker."""
        flight = self.clients[number % len(self.clients)].flight
        attempt = flight.attempt
        id, sequence, worker = (
            (attempt.id, attempt.deltas, attempt.worker) if attempt else (flight.id, 0, "nobody")
        )
        others = [name for name in [*self.peers, "stranger"] if name != worker]
        for signature in (other := others[number % len(others)], worker):
            delta = Delta(id=id, sequence=sequence, tokens=[1], text=FORGED)
            messages: list[ToGateway] = [
                StepOutputs(incarnation=signature, deltas=[delta]),
                finished(signature, id),
                failed(signature, id, FORGED),
                reused(signature, id, 1, FORGED),
                accepted(signature, id),
            ]
            self.dispatcher.on_message(other, messages[kind])

    def worker_skips_or_repeats_a_delta(self, number: int, offset: int) -> None:
        """Deliver a delta with its correct text but a wrong sequence number."""
        attempt = self.clients[number % len(self.clients)].flight.attempt
        peer = self.peers[attempt.worker] if attempt else None
        if attempt and peer and attempt.id in peer.rows:
            delta = peer.delta(attempt.id, max(0, attempt.deltas + offset))
            self.dispatcher.on_message(peer.name, StepOutputs(incarnation=peer.name, deltas=[delta]))

    def worker_ends_a_request_twice(self, number: int, id: int) -> None:
        """Repeat the end of a request after its worker has ended it."""
        peer = self.pick(number, list(self.peers.values()))
        for attempt in sorted(said for said in peer.said if said.partition("~")[0] == f"r{id}"):
            peer.line.append(failed(peer.name, attempt, "engine_error"))
            peer.line.append(StepOutputs(incarnation=peer.name, deltas=[peer.delta(attempt, TOKENS)]))

    # --- time ---

    def time_passes(self, seconds: float) -> None:
        self.line.clock.now += seconds
        self.dispatcher.sweep()

    def time_passes_while_workers_beat(self, seconds: int) -> None:
        for _ in range(int(seconds)):
            self.line.clock.now += 1.0
            for peer in self.alive():
                peer.steps += 0 if peer.hung else 1
                self.dispatcher.on_message(peer.name, peer.heartbeat())
            self.dispatcher.sweep()

    # --- clients ---

    def clients_come(self, model: str | None, times: int, choices: int) -> None:
        for _ in range(times):
            self.open(model, choices)

    def poison_comes(self, model: str) -> None:
        self.open(model, 1, POISON)

    def open(self, model: str | None, choices: int, kind: str = "r") -> None:
        try:
            worker = self.dispatcher.find(model)
        except RequestError as error:
            refused = error.code
        else:
            assert model in (None, worker.model)
            self.submit_requests(worker, choices, kind)
            return
        assert refused in {Code.WORKER_UNAVAILABLE, Code.MODEL_LOADING, Code.SHUTTING_DOWN}

    def submit_requests(self, worker: Worker, choices: int, kind: str) -> None:
        flights = self.dispatcher.flights
        present = len(flights.assigned(worker.incarnation)) + len(flights.waiting(worker.model))
        full = present + choices > ROWS + WAITING
        ids = [f"{kind}{self.opened + number}" for number in range(1, choices + 1)]
        requests = [request(id, prompt=ids[0]) for id in ids]
        self.opened += choices
        context = self.dispatcher.submit(worker, requests, ())
        try:
            opened = context.__enter__()
        except RequestError as error:
            refused = error.code
        else:
            assert not full
            self.clients += [Client(context, flight) for flight in opened]
            return
        assert full or not self.reachable(worker.incarnation)
        assert refused is (Code.TEXT_GENERATION_BUSY if full else Code.WORKER_UNAVAILABLE)

    def reachable(self, name: str) -> bool:
        peer = self.peers[name]
        return not peer.full and not peer.noticed

    def client_reads(self, number: int) -> None:
        self.clients[number % len(self.clients)].take()

    def client_leaves(self, number: int) -> None:
        self.leave(self.clients[number % len(self.clients)])

    def leave(self, one: Client) -> None:
        party = [client for client in self.clients if client.context is one.context]
        attempts = [client.flight.attempt for client in party if client.flight.terminal is None]
        running = [(attempt.worker, attempt.id) for attempt in attempts if attempt is not None]
        self.line.sent.clear()
        one.context.__exit__(None, None, None)
        for client in party:
            self.clients.remove(client)
            client.take()
            self.check(client)
            end = getattr(client.flight.terminal, "code", "")
            self.ends[end] += 1
            self.ends["innocents taken for guilty"] += end == Code.WORKER_CRASHED and not is_poison(client)
        told = [(to, message.id) for to, message in self.line.sent if isinstance(message, Cancel)]
        assert told == running

    # --- operators ---

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

    def operator_has_waited(self, number: int) -> None:
        context, order, asked = self.orders.pop(number % len(self.orders))
        answered = {message.incarnation for _, message in order.freed}
        assert len(answered) == len(order.freed)
        lost = asked - answered - order.awaited.keys()
        assert bool(lost) == (order.died is not None)
        context.__exit__(None, None, None)

    # --- shutdown of the gateway ---

    def gateway_goes(self, dice: int) -> None:
        if dice == 0:
            self.dispatcher.stop()
        elif dice < 5 and self.dispatcher.stopping:
            self.dispatcher.fail_all()
            assert all(client.flight.terminal is not None for client in self.clients)

    # --- invariants ---

    def every_open_request_is_a_flight_and_no_other(self) -> None:
        assert list(self.dispatcher.flights) == [client.flight for client in self.clients]

    def whoever_waits_is_aboard_nobody(self) -> None:
        flights = self.dispatcher.flights
        assigned = [flight for name in self.peers for flight in flights.assigned(name)]
        open_ones = [client.flight for client in self.clients if client.flight.terminal is None]
        assert {flight.id for flight in open_ones} == {f.id for f in [*assigned, *flights.waiting()]}
        assert len(open_ones) == len(assigned) + len(flights.waiting())

    def flights_are_sound(self) -> None:
        for client in self.clients:
            assert len(client.flight.pending) <= PENDING_DELTAS_MAX + 2
            self.check(client)

    def check(self, client: Client) -> None:
        flight, items = client.flight, [*client.read, *client.flight.pending]
        texts = [item.text for item in items if isinstance(item, Delta)]
        # No text is lost, duplicated, reordered, forged or from another flight or worker.
        assert texts == [text_at(flight.id, n) for n in range(len(texts))]
        assert flight.tokens == list(range(len(texts)))
        told = [item.reuse for item in items if isinstance(item, PrefixHit)]
        assert told == ([flight.reuse] if flight.reuse is not None else [])
        assert FORGED not in [reuse.tier for reuse in told]
        ends = [item for item in items if isinstance(item, Finished | Failed)]
        assert len(ends) == (flight.terminal is not None)
        if ends:
            assert items[-1] is ends[0] is flight.terminal
        match flight.terminal:
            case Finished(usage=usage):
                assert len(texts) == usage.completion_tokens == TOKENS
            case Failed(code=code):
                assert code in POSSIBLE

    def all_is_well_for_a_while(self) -> None:
        """Play one round without faults except poison: lost workers are noticed and replaced."""
        for name, _ in self.line.killed:
            self.peers[name].alive = False
        self.line.killed.clear()
        for peer in self.unnoticed():
            self.notice(peer)
        for model in ("m1", "m2"):
            if not any(peer.loaded for peer in self.alive() if peer.model == model):
                self.worker_comes(model, loaded=True)
        for peer in self.alive():
            peer.work()
            peer.line.append(peer.heartbeat())
        for peer in self.peers.values():
            while peer.line:
                self.dispatcher.on_message(peer.name, peer.line.popleft())
        self.line.clock.now += 0.25
        self.dispatcher.sweep()

    def all_ends_well(self) -> None:
        """Check that every flight ends within `ROUNDS_MAX` rounds without faults."""
        for peer in self.alive():
            peer.hung = peer.full = False
        for _ in range(ROUNDS_MAX):
            if all(client.flight.terminal is not None for client in self.clients):
                break
            self.all_is_well_for_a_while()
        for client in self.clients:
            client.take()
            assert client.ended, f"{client.flight.id} hangs"
        while self.clients:
            self.leave(self.clients[0])
        for _ in range(ROUNDS_AFTER):
            self.all_is_well_for_a_while()
        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        flights = self.dispatcher.flights
        assert (len(flights), flights.waiting()) == (0, [])
        assert not any(flights.attempts(name) for name in self.peers)
        assert not any(peer.rows for peer in self.alive())


Action = Callable[[Gateway, Callable[[], int]], object]
"""Event of a simulated history. The second argument draws a number below 100."""

ACTIONS: dict[Action, int] = {
    lambda g, n: g.clients_come(["m1", "m1", "m2", None][n() % 4], 1, 1 + n() % 2): 12,
    lambda g, n: g.poison_comes(["m1", "m2"][n() % 2]): 1,
    lambda g, n: g.alive() and g.worker_works(n(), 1 + n() % 2): 30,
    lambda g, n: g.deliver(n(), 1 + n() % 4): 40,
    lambda g, n: g.alive() and g.worker_beats(n()): 10,
    lambda g, n: g.time_passes([0.25, 0.25, SILENT_S + 0.1][n() % 3]): 6,
    lambda g, n: g.under_way() and g.something_happens(n(), ["lost", "doubled", "swapped"][n() % 3]): 6,
    lambda g, n: g.clients and g.client_reads(n()): 6,
    lambda g, n: g.clients and g.client_leaves(n()): 3,
    lambda g, n: len(g.alive()) < WORKERS_MAX and g.worker_comes(["m1", "m2"][n() % 2], n() % 3 > 0): 4,
    lambda g, n: g.alive() and g.worker_has_loaded(n()): 3,
    lambda g, n: g.alive() and g.worker_dies(n(), n() % 4 == 0): 3,
    lambda g, n: g.unnoticed() and g.death_is_noticed(n()): 8,
    lambda g, n: g.alive() and g.worker_hangs_or_recovers(n()): 2,
    lambda g, n: g.alive() and g.workers_queue_fills_or_empties(n()): 2,
    lambda g, n: g.alive() and g.worker_reconnects(n(), n() % 2 == 0, n() % 2 == 0): 2,
    lambda g, n: g.alive() and g.a_living_worker_is_taken_for_dead(n()): 1,
    lambda g, n: g.clients and g.somebody_else_speaks_of_a_flight(n(), n() % 5): 4,
    lambda g, n: g.clients and g.worker_skips_or_repeats_a_delta(n(), [-1, 1, 2][n() % 3]): 2,
    lambda g, n: g.at_work() and g.worker_fails_a_row(n(), ["engine_error", "a_later_code"][n() % 2]): 1,
    lambda g, n: g.opened and g.worker_ends_a_request_twice(n(), 1 + n() % 60): 2,
    lambda g, n: g.time_passes_while_workers_beat([2, 2, 2, int(STALL_S) + 2][n() % 4]): 3,
    lambda g, n: len(g.orders) < 3 and g.operator_clears(["m1", "m2", None][n() % 3]): 3,
    lambda g, n: g.orders and g.operator_has_waited(n()): 2,
    lambda g, n: g.gateway_goes(n() % 30): 4,
}


def play(seed: int, actions: int = 200) -> Gateway:
    """Play a history determined by its seed, to its end."""
    dice = random.Random(seed)
    gateway = Gateway()
    gateway.two_workers_serve()
    for action in dice.choices(list(ACTIONS), list(ACTIONS.values()), k=actions):
        action(gateway, lambda: dice.randrange(100))
        gateway.every_open_request_is_a_flight_and_no_other()
        gateway.whoever_waits_is_aboard_nobody()
        gateway.flights_are_sound()
    gateway.all_ends_well()
    return gateway


def soak(seeds: range) -> Counter[str]:
    """Play all seeds, and count the outcomes."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            gateway = play(seed)
        except Exception as error:
            raise AssertionError(f"play({seed}) fails") from error
        seen.update(gateway.dispatcher.dropped)
        seen.update(gateway.dispatcher.failover.counts)
        seen.update(gateway.ends)
    return seen


def test_whatever_a_seed_brings_about_every_request_ends_once_and_whole() -> None:
    seen = soak(range(SEEDS))
    # The histories are useful only if all of these outcomes occur.
    assert seen.keys() >= {"double", "gap", "lost", "stray", "no_flight", "forged", "unknown_sender"}
    assert seen.keys() >= {"grounded", "resumed", "adopted", "worker_crashed", "shutting_down", ""}


if __name__ == "__main__":
    logging.disable()
    print(soak(range(int(sys.argv[1]), int(sys.argv[2]))))
