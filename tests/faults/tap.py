"""A line that harms what passes: a thread between gateway and workers that loses, doubles and cuts messages.

To the gateway it is the workers, each under its own name, and to workers the gateway. A worker that dies is
hung up on the other side too. Messages about connections pass unharmed: those are ZeroMQ's promise.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol import sockets, wire
from protocol.messages import Message
from tests.broker.peers import of_flights

POLL_MS = 20

Decode = Callable[[list[bytes]], tuple[Message, list[bytes]]]


class Tap(threading.Thread):
    """Workers connect to `endpoint`. `share`: of the messages about requests, how many are harmed; `counts`:
    how many were, and how."""

    def __init__(self, folder: Path, gateway: str, seed: int) -> None:
        super().__init__(name="tap")
        self.endpoint = f"ipc://{folder}/tap"
        self.share = 0.0
        self.counts: Counter[str] = Counter()
        self._gateway = gateway
        self._dice = random.Random(seed)
        self._over = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = sockets.bind_router(self._context, self.endpoint, None)
        self._monitor = self._front.get_monitor_socket()
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._names: dict[object, bytes] = {}
        """By the descriptor of their connection."""

    def run(self) -> None:
        while not self._over.is_set():
            poller = zmq.Poller()
            for socket in (self._front, self._monitor, *self._backs.values()):
                poller.register(socket, zmq.POLLIN)
            poller.poll(POLL_MS)
            self._carry_up()
            for name, back in self._backs.items():
                for frames in _read(back):
                    self._carry_down(name, [frame.bytes for frame in frames])
            self._hang_up()
        for back in self._backs.values():
            _close(back)
        _close(self._front)
        self._context.term()

    def _carry_up(self) -> None:
        for name, *frames in _read(self._front):
            self._names[frames[-1].get(zmq.SRCFD)] = name.bytes
            if name.bytes not in self._backs:
                back = sockets.connect_dealer(self._context, self._gateway, name.bytes.decode(), None)
                back.setsockopt(zmq.IMMEDIATE, 0)
                self._backs[name.bytes] = back
            said = [frame.bytes for frame in frames]
            for harmed in self._harm(said, wire.decode_to_gateway):
                self._backs[name.bytes].send_multipart(harmed)

    def _carry_down(self, name: bytes, frames: list[bytes]) -> None:
        for harmed in self._harm(frames, wire.decode_to_worker):
            with contextlib.suppress(zmq.ZMQError):  # it has just died
                self._front.send_multipart([name, *harmed])

    def _harm(self, frames: list[bytes], decode: Decode) -> list[list[bytes]]:
        """What goes on in place of a message."""
        if self._dice.random() >= self.share or not of_flights(decode(frames)[0]):
            return [frames]
        how = self._dice.choice(["lost", "doubled", "cut"])
        self.counts[how] += 1
        match how:
            case "lost":
                return []
            case "doubled":
                return [frames, frames]
        return [[frames[0][: self._dice.randrange(len(frames[0]))], *frames[1:]]]

    def _hang_up(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                back = self._backs.pop(self._names.pop(event["value"], b""), None)
                if back is not None:
                    _close(back)

    def stop(self) -> None:
        self._over.set()
        self.join()


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
def tapped(folder: Path, gateway: str, seed: int) -> Iterator[Tap]:
    """A line to the gateway at that endpoint."""
    tap = Tap(folder, gateway, seed)
    tap.start()
    try:
        yield tap
    finally:
        tap.stop()
