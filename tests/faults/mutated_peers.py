"""Simulated peers for both ends of the connection: they send valid messages mixed with mutated ones.

The messages sent depend on the dice and on the messages of the other end.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import zmq
from msgspec.structs import asdict, replace

from protocol import sockets, wire
from protocol.conversation import pack
from protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Draining,
    Failed,
    Finished,
    Generate,
    Goodbye,
    Hello,
    Message,
    Ready,
    Rejected,
    Welcome,
    new_incarnation,
)
from protocol.types import Sampling
from tests.protocol.fuzz import frames_of
from tests.protocol.samples import FULL, LEAST, direction_of

AT_ONCE = 25
MOMENT_MS = 50
WAIT_MS = 60_000


def addressed(
    kinds: Sequence[Message], incarnation: str, ids: Sequence[str], dice: random.Random
) -> list[list[bytes]]:
    """Return valid messages of these kinds from `incarnation` about the requests `ids`."""
    found = []
    for message in kinds:
        changes: dict[str, object] = {"incarnation": incarnation}
        if "id" in message.__struct_fields__ and ids:
            changes["id"] = dice.choice(ids)
        signed = replace(message, **changes)
        if ids and "deltas" in message.__struct_fields__:
            signed = replace(
                signed, deltas=[replace(d, id=dice.choice(ids)) for d in asdict(message)["deltas"]]
            )
        media = [b"an image"] * sum(each.frames for each in asdict(message).get("media", ()))
        found.append(wire.encode(signed, media))
    return found


def _samples(direction: str) -> list[Message]:
    return [message for message in (*FULL, *LEAST) if direction_of(message) == direction]


FROM_GATEWAY, FROM_WORKER = _samples("to_worker"), _samples("to_gateway")
REQUESTS = [
    Generate(incarnation="", id="", sampling=Sampling(seed=7), prompt="a b c", max_tokens=3),
    Generate(
        incarnation="",
        id="",
        sampling=Sampling(seed=7, temperature=0.8, top_p=0.9, logit_bias={3: -100.0}, logprobs=3),
        messages=pack([{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
        tools=pack([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
        stop=["never"],
        max_tokens=5,
        resume=[3, 4, 5],
        template_kwargs=pack({"enable_thinking": True}),
    ),
]
_ENDINGS = Welcome | Rejected
FROM_GATEWAY_THAT_STAYS = [m for m in FROM_GATEWAY if not isinstance(m, _ENDINGS)] + 4 * REQUESTS
FROM_WORKER_THAT_STAYS = [m for m in FROM_WORKER if not isinstance(m, Draining | Goodbye | Hello)]


def _close(socket: zmq.Socket[bytes]) -> None:
    monitor = socket.get_monitor_socket()
    socket.disable_monitor()
    monitor.close(0)
    socket.close()


class FalseWorker:
    """A simulated worker that announces itself, receives requests, and sends arbitrary messages."""

    MODEL = "fuzzed"

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.name = new_incarnation()
        self._socket = sockets.connect_dealer(context, endpoint, self.name, None)
        self._socket.setsockopt(zmq.SNDTIMEO, WAIT_MS)
        self._open: list[str] = []
        self._greeted = False
        self.heard: Counter[str] = Counter()

    def _introduce(self) -> None:
        self._open.clear()
        self._greeted = True
        self._send(Hello(incarnation=self.name, version=PROTOCOL_VERSION, model=self.MODEL, pid=1))
        self._send(Ready(incarnation=self.name, model=self.MODEL, context_length=8192, running_max=8))

    def _send(self, message: Message) -> None:
        self._socket.send_multipart(wire.encode(message))

    def speak(self, dice: random.Random, count: int) -> None:
        """Send `count` messages about the received requests."""
        self._introduce()
        self._listen(until=Generate)
        kinds = FROM_WORKER if dice.random() < 0.2 else FROM_WORKER_THAT_STAYS
        for number in range(count):
            if number % AT_ONCE == 0:
                self._listen()
                seeds = addressed(kinds, self.name, self._open, dice)
            self._socket.send_multipart(frames_of(dice, seeds) or [b""])
        self._listen()

    def _listen(self, until: type[Message] | None = None) -> None:
        """Read the received messages; wait briefly for one of the type `until`."""
        while self._socket.poll(MOMENT_MS if until else 0):
            message, _ = wire.decode_to_worker(self._socket.recv_multipart())
            self.heard[type(message).__name__] += 1
            until = None if until and isinstance(message, until) else until
            match message:
                case Welcome() if self._greeted:  # the reply
                    self._greeted = False
                case Welcome():
                    self._introduce()
                case Generate(id=id):
                    self._open = [*self._open[-7:], id]

    def close(self) -> None:
        self._listen()
        self._end(self._open)
        _close(self._socket)

    def _end(self, ids: Sequence[str]) -> None:
        for id in ids:
            self._send(Failed(incarnation=self.name, id=id, code="engine_error", message="It was false."))


class FalseGateway:
    """A simulated gateway that sends a worker arbitrary messages and occasional real requests."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.name = new_incarnation()
        self._socket = sockets.bind_router(context, endpoint, None)
        self._socket.setsockopt(zmq.SNDTIMEO, WAIT_MS)
        self._worker = b""
        self._open: list[str] = []
        self._probes = 0
        self.heard: Counter[str] = Counter()

    def meet(self) -> None:
        """Wait until the worker is ready."""
        self._until(lambda message: isinstance(message, Ready))

    def _until(self, done: Callable[[Message], bool]) -> None:
        deadline = time.monotonic() + WAIT_MS / 1000
        while self._socket.poll(max(0, round(1000 * (deadline - time.monotonic())))):
            self._worker, *frames = self._socket.recv_multipart()
            message, _ = wire.decode_to_gateway(frames)
            self.heard[type(message).__name__] += 1
            if isinstance(message, Hello):
                self._send(Welcome(incarnation=self.name, version=PROTOCOL_VERSION))
            if done(message):
                return
        raise AssertionError("the worker does not send what it should any more")

    def _send(self, message: Message) -> None:
        self._socket.send_multipart([self._worker, *wire.encode(message)])

    def speak(self, dice: random.Random, count: int) -> None:
        """Send `count` messages, then cancel all requests that they started."""
        kinds = FROM_GATEWAY if dice.random() < 0.2 else FROM_GATEWAY_THAT_STAYS
        begun: dict[str, None] = {}
        for number in range(count):
            if number % AT_ONCE == 0:
                ids = [f"cmpl-{dice.randrange(2**32):x}" for _ in range(AT_ONCE)]
                seeds = addressed(kinds, self.name, ids, dice)
            frames = frames_of(dice, seeds) or [b""]
            if (request := _understood(frames)) is not None:
                begun[request] = None
                self._socket.send_multipart([self._worker, *frames])
        for id in begun:
            self._send(Cancel(incarnation=self.name, id=id))

    def ask(self, prompt: str) -> str:
        """Send a real request and return the worker's answer."""
        self._probes += 1
        id, text = f"probe-{self._probes}", ""
        request = Generate(incarnation=self.name, id=id, sampling=Sampling(seed=1), prompt=prompt)
        self._send(Welcome(incarnation=self.name, version=PROTOCOL_VERSION))
        self._send(request)

        def ended(message: Message) -> bool:
            nonlocal text
            for delta in getattr(message, "deltas", ()):
                text += delta.text if delta.id == id else ""
            return isinstance(message, Finished | Failed) and message.id == id

        self._until(ended)
        return text

    def close(self) -> None:
        _close(self._socket)


def _understood(frames: Sequence[bytes]) -> str | None:
    """Return the id of the request that these frames start, if any; None: they would end the worker, or its
    connection to a gateway that stays."""
    try:
        message, _ = wire.decode_to_worker(frames)
    except wire.WireError:
        return ""
    if isinstance(message, Rejected):
        return None
    return message.id if isinstance(message, Generate) else ""
