"""The gateway's end of a worker's connection, driven by a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import zmq

from protocol import sockets, wire
from protocol.messages import (
    PROTOCOL_VERSION,
    Adopt,
    Cancel,
    Heartbeat,
    Hello,
    Message,
    Ready,
    ToGateway,
    Welcome,
    new_incarnation,
)
from protocol.types import AdoptedRow, Sampling
from tests import factories

WAIT_S = 60.0

M = TypeVar("M", bound=Message)


class Gateway:
    """The gateway's end of the connection, driven by the test."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/line"
        self.incarnation = "gateway-1"
        self.orphan_s = 0.0
        self.worker = b""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.open()

    def open(self) -> None:
        self._router = sockets.bind_router(self._context, self.endpoint, None)

    def close(self) -> None:
        if self._router.closed:
            return
        monitor = self._router.get_monitor_socket()
        self._router.disable_monitor()
        monitor.close(0)
        self._router.close(0)

    def end(self) -> None:
        self.close()
        self._context.term()

    def next(self) -> ToGateway:
        """Return the next message, and check its sender."""
        assert self._router.poll(int(1000 * WAIT_S)), "no message from the worker"
        self.worker, *frames = self._router.recv_multipart()
        message, _ = wire.decode_to_gateway(frames)
        assert message.incarnation == self.worker.decode()
        return message

    def until(self, kind: type[M], check: Callable[[M], object] = lambda message: True) -> M:
        """Return the next message of a kind, skipping others."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            message = self.next()
            if isinstance(message, kind) and check(message):
                return message
        raise AssertionError(f"no such {kind.__name__}")

    def during_beats(self, count: int) -> list[ToGateway]:
        """Return all messages until `count` heartbeats have arrived."""
        said: list[ToGateway] = []
        while sum(isinstance(message, Heartbeat) for message in said) < count:
            said.append(self.next())
        return said

    def send(self, message: Message) -> None:
        self.send_frames(*wire.encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self._router.send_multipart([self.worker, *frames])

    def welcome(self) -> None:
        self.send(Welcome(incarnation=self.incarnation, version=PROTOCOL_VERSION, orphan_s=self.orphan_s))

    def adopt(self, *rows: AdoptedRow) -> None:
        self.send(Adopt(incarnation=self.incarnation, rows=list(rows)))

    def die(self) -> None:
        """Be replaced by another gateway, which hears of what happened only from the worker."""
        self.close()
        self.incarnation = new_incarnation()
        self.open()

    def generate(self, id: str, prompt: str) -> None:
        sampling = Sampling(seed=1)
        self.send(factories.request(id, incarnation=self.incarnation, prompt=prompt, sampling=sampling))

    def cancel(self, id: str) -> None:
        self.send(Cancel(incarnation=self.incarnation, id=id))

    def meet(self) -> Hello:
        """Shake hands with a new worker; return when it serves and its first reports have been received."""
        hello = self.until(Hello)
        self.welcome()
        self.until(Ready)
        # Reports made before the handshake may follow the initial state.
        self.during_beats(2)
        return hello
