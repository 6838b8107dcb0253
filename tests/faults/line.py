"""A faulty proxy between gateway and workers: it loses, duplicates, swaps and truncates messages.

It connects to the gateway once for each worker, under its name, and disconnects with it. Messages about
connections and heartbeats pass unchanged, because ZeroMQ's guarantees for them are not under test.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol import sockets, wire
from protocol.messages import Message
from tests.broker.peers import of_flights

POLL_MS = 20

KINDS = ("lost", "doubled", "swapped", "cut")
Decode = Callable[[list[bytes]], tuple[Message, list[bytes]]]


class Passing(NamedTuple):
    """A message from or to the worker of this name."""

    worker: bytes
    frames: list[bytes]


class Direction:
    """One direction of the proxy."""

    def __init__(self, dice: random.Random, counts: Counter[str], decode: Decode) -> None:
        self._dice, self._counts, self._decode = dice, counts, decode
        self._held: list[Passing] = []

    def harm(self, passing: Passing, share: float) -> list[Passing]:
        """Return the messages to forward instead. `share`: the fraction of request messages to harm."""
        held = self.held()
        if self._dice.random() >= share or not of_flights(self._decode(passing.frames)[0]):
            return [passing, *held]
        how = self._dice.choice(KINDS)
        self._counts[how] += 1
        match how:
            case "lost":
                return held
            case "doubled":
                return [passing, passing, *held]
            case "swapped":
                self._held = [passing]
                return held
        head, *others = passing.frames
        return [Passing(passing.worker, [head[: self._dice.randrange(len(head))], *others]), *held]

    def held(self) -> list[Passing]:
        """Return the delayed messages that no later message has overtaken in time."""
        held, self._held = self._held, []
        return held


class Line(threading.Thread):
    """The proxy. Workers connect to `endpoint`. `counts`: the number of harmed messages by kind."""

    def __init__(self, folder: Path, gateway: str, seed: int) -> None:
        super().__init__(name="line")
        self.endpoint = f"ipc://{folder}/harmed"
        self.share = 0.0
        """The fraction of request messages that are harmed; it may be changed."""
        self.counts: Counter[str] = Counter()
        self._gateway = gateway
        self._over = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = sockets.bind_router(self._context, self.endpoint, None)
        self._monitor = self._front.get_monitor_socket()
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._names: dict[object, bytes] = {}
        """Names of workers by the descriptor of their connection."""
        dice = random.Random(seed)
        self._up = Direction(dice, self.counts, wire.decode_to_gateway)
        self._down = Direction(dice, self.counts, wire.decode_to_worker)

    def run(self) -> None:
        while not self._over.is_set():
            poller = zmq.Poller()
            for socket in (self._front, self._monitor, *self._backs.values()):
                poller.register(socket, zmq.POLLIN)
            if not poller.poll(POLL_MS):
                self._send_up(self._up.held())
                self._send_down(self._down.held())
            for address, *frames in _read(self._front):
                self._names[frames[-1].get(zmq.SRCFD)] = address.bytes
                self._send_up(self._up.harm(_passing(address.bytes, frames), self.share))
            for name, back in self._backs.items():
                for frames in _read(back):
                    self._send_down(self._down.harm(_passing(name, frames), self.share))
            self._hang_up()
        self._context.destroy(0)  # closes the sockets' monitors too

    def _send_up(self, messages: Sequence[Passing]) -> None:
        for name, frames in messages:
            if name not in self._backs:
                back = sockets.connect_dealer(self._context, self._gateway, name.decode(), None)
                back.setsockopt(zmq.IMMEDIATE, 0)
                self._backs[name] = back
            self._backs[name].send_multipart(frames)

    def _send_down(self, messages: Sequence[Passing]) -> None:
        for name, frames in messages:
            with contextlib.suppress(zmq.ZMQError):  # it has just died
                self._front.send_multipart([name, *frames])

    def _hang_up(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                back = self._backs.pop(self._names.pop(event["value"], b""), None)
                if back is not None:
                    _close(back)
                    self._up.held()  # otherwise they would revive the worker

    def stop(self) -> None:
        self._over.set()
        self.join()


def _passing(worker: bytes, frames: Sequence[zmq.Frame]) -> Passing:
    return Passing(worker, [frame.bytes for frame in frames])


def _read(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)


def _close(socket: zmq.Socket[bytes]) -> None:
    monitor = socket.get_monitor_socket()
    socket.disable_monitor()
    monitor.close(0)
    socket.close(0)


@contextlib.contextmanager
def harmed(folder: Path, gateway: str, seed: int) -> Iterator[Line]:
    """Run a proxy to the gateway at the endpoint `gateway`."""
    line = Line(folder, gateway, seed)
    line.start()
    try:
        yield line
    finally:
        line.stop()
