"""A line between gateway and worker that loses, doubles and swaps messages: a ROUTER and DEALERs in a thread.

Messages about connections and heartbeats pass: what ZeroMQ promises of those is not put in question.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from protocol import sockets, wire
from tests.broker.peers import of_flights

POLL_MS = 20

Frames = list[bytes]


class Disturbed:
    """One direction of the line. `send` takes what comes through."""

    def __init__(self, dice: random.Random, share: float, counts: Counter[str]) -> None:
        """`share`: of the messages about requests, to how many something happens."""
        self._dice, self._share, self._counts = dice, share, counts
        self._held: Callable[[], None] | None = None

    def carry(self, send: Callable[[], None], *, may_suffer: bool) -> None:
        held, self._held = self._held, None
        how = self._dice.choice(["lost", "doubled", "swapped"])
        if not may_suffer or self._dice.random() >= self._share:
            how = "passed"
        self._counts[how] += 1
        match how:
            case "passed":
                send()
            case "doubled":
                send()
                send()
            case "swapped":
                self._held = send
        if held is not None:
            held()

    def flush(self) -> None:
        """Nothing has come for a while: what waits to be overtaken need not wait any longer."""
        held, self._held = self._held, None
        if held is not None:
            held()


class Line(threading.Thread):
    """Workers connect to `endpoint`; what they say arrives at the gateway under their own names."""

    def __init__(self, folder: Path, gateway: str, seed: int, share: float) -> None:
        super().__init__(name="line")
        self.endpoint = f"ipc://{folder}/disturbed"
        self.counts: Counter[str] = Counter()
        self._gateway = gateway
        self._over = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = sockets.bind_router(self._context, self.endpoint, None)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        dice = random.Random(seed)
        self._up = Disturbed(dice, share, self.counts)
        self._down = Disturbed(dice, share, self.counts)

    def run(self) -> None:
        while not self._over.is_set():
            poller = zmq.Poller()
            for socket in (self._front, *self._backs.values()):
                poller.register(socket, zmq.POLLIN)
            if not poller.poll(POLL_MS):
                self._up.flush()
                self._down.flush()
            for name, *frames in _read(self._front):
                self._carry_up(name, frames)
            for name, back in self._backs.items():
                for frames in _read(back):
                    self._carry_down(name, frames)
        self._context.destroy(0)  # the sockets' monitors, too

    def _carry_up(self, name: bytes, frames: Frames) -> None:
        if name not in self._backs:
            back = sockets.connect_dealer(self._context, self._gateway, name.decode(), None)
            back.setsockopt(zmq.IMMEDIATE, 0)
            self._backs[name] = back
        message, _ = wire.decode_to_gateway(frames)
        self._up.carry(lambda: self._backs[name].send_multipart(frames), may_suffer=of_flights(message))

    def _carry_down(self, name: bytes, frames: Frames) -> None:
        message, _ = wire.decode_to_worker(frames)

        def send() -> None:
            with contextlib.suppress(zmq.ZMQError):  # it is gone
                self._front.send_multipart([name, *frames])

        self._down.carry(send, may_suffer=of_flights(message))

    def stop(self) -> None:
        self._over.set()
        self.join()


def _read(socket: zmq.Socket[bytes]) -> Iterator[Frames]:
    while True:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


@contextlib.contextmanager
def disturbed(folder: Path, gateway: str, seed: int, share: float) -> Iterator[Line]:
    """A line to the gateway at that endpoint."""
    line = Line(folder, gateway, seed, share)
    line.start()
    try:
        yield line
    finally:
        line.stop()
