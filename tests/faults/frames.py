"""Mutated frames for a live gateway and a live worker: `python -m tests.faults.frames --frames 1000000`.

Each end is the real process at a real socket; who speaks to it is false. Whatever it is sent, it counts and
drops what it cannot read, lives on, grows no further and is brief about it; a real request beside it all is
answered. What is sent is a function of the seed and of what the other end has said.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from msgspec.structs import asdict, replace

from protocol import sockets, wire
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
    Sampling,
    Welcome,
    new_incarnation,
)
from tests.faults.beside import Health, Neighbour
from tests.faults.streams import Client, scripted
from tests.protocol.fuzz import frames_of
from tests.protocol.samples import FULL, LEAST, direction_of
from tests.system import Process, chat_body, running_system

BATCH = 200
LIVES = 100
"""Batches after which a false worker ends, and another one comes."""
AT_ONCE = 25
VICTIMS = 4
MOMENT_MS = 50
WAIT_MS = 60_000
GATEWAY_FLAGS = ("--hung-timeout", "86400", "--failover-timeout", "2")
"""What a false worker says of its process id must not be acted upon."""
PROBE = "a real one !tokens=5"


@dataclass(slots=True)
class Outcome:
    """What became of it all. `answered`: real requests beside it."""

    sent: int = 0
    answered: int = 0
    heard: Counter[str] = field(default_factory=Counter)
    growth_bytes: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def addressed(
    kinds: Sequence[Message], incarnation: str, ids: Sequence[str], dice: random.Random
) -> list[list[bytes]]:
    """Sound messages of these kinds, signed with `incarnation` and about `ids`."""
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
        media = [b"an image"] * len(asdict(message).get("media", ()))
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
        sampling=Sampling(seed=7, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, logprobs=3),
        messages=[{"role": "user", "content": "hello"}],
        stop=["never"],
        max_tokens=4,
        template_kwargs={"enable_thinking": True},
    ),
    Generate(
        incarnation="",
        id="",
        sampling=Sampling(seed=7, logit_bias={3: -100.0}, repetition_penalty=1.2, presence_penalty=1.0),
        messages=[
            {"role": "system", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        max_tokens=5,
        resume=[3, 4, 5],
    ),
]
FROM_GATEWAY_THAT_STAYS = [m for m in FROM_GATEWAY if not isinstance(m, Welcome | Rejected)] + 3 * REQUESTS
FROM_WORKER_THAT_STAYS = [m for m in FROM_WORKER if not isinstance(m, Draining | Goodbye | Hello)]


def _close(socket: zmq.Socket[bytes]) -> None:
    monitor = socket.get_monitor_socket()
    socket.disable_monitor()
    monitor.close(0)
    socket.close()


# --- a false worker, for a real gateway --------------------------------------------------------------


class FalseWorker:
    """Introduces itself, is given requests, and says anything."""

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
        """So many messages, about what it is given."""
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
        """Hear what has come; wait a moment for a message of a certain kind."""
        while self._socket.poll(MOMENT_MS if until else 0):
            message, _ = wire.decode_to_worker(self._socket.recv_multipart())
            self.heard[type(message).__name__] += 1
            until = None if until and isinstance(message, until) else until
            match message:
                case Welcome() if self._greeted:  # the answer
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


class Victim(threading.Thread):
    """A client who asks the false worker again and again: any end will do, but there must be one."""

    def __init__(self, url: str, over: threading.Event) -> None:
        super().__init__()
        self._url, self._over = url, over
        self.statuses: Counter[int] = Counter()

    def run(self) -> None:
        body = chat_body("anything", stream=True, model=FalseWorker.MODEL, max_tokens=50)
        while not self._over.is_set():
            client = Client(self._url, body)
            client.run()
            self.statuses[client.status] += 1
            self._over.wait(0.01)


def at_gateway(folder: Path, frames: int, seed: int) -> Outcome:
    """So many messages to a gateway, which serves real clients with a real worker meanwhile."""
    outcome, over = Outcome(), threading.Event()
    with running_system(folder, GATEWAY_FLAGS) as system, zmq.Context[zmq.Socket[bytes]]() as context:
        system.start_worker("--name", "real")
        system.wait_ready()
        health = Health([system.gateway, *system.workers])
        victims = [Victim(system.url, over) for _ in range(VICTIMS)]
        with Neighbour(system.url, "real") as neighbour:
            for victim in victims:
                victim.start()
            try:
                lives = _live_falsely(context, system.endpoint, frames // BATCH, random.Random(seed), health)
                outcome.heard = sum(lives, Counter())
            finally:
                over.set()
                for victim in victims:
                    victim.join()
        outcome.sent, outcome.answered = frames // BATCH * BATCH, neighbour.streams
        outcome.wrong = health.complaints() + [neighbour.wrong][: bool(neighbour.wrong)]
        outcome.growth_bytes = health.growth_bytes
        for victim in victims:
            outcome.heard.update({f"victims told {status}": n for status, n in victim.statuses.items()})
        status = system.http.get("/v1/status").json()["gateway"]
        outcome.heard.update({f"dropped as {name}": count for name, count in status["dropped"].items()})
    return outcome


def _live_falsely(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, batches: int, dice: random.Random, health: Health
) -> Iterator[Counter[str]]:
    """One false worker after another; what each has heard."""
    for first in range(0, batches, LIVES):
        worker = FalseWorker(context, endpoint)
        for number in range(first, min(first + LIVES, batches)):
            if number == batches // 10:
                health.warm()
            worker.speak(dice, BATCH)
        worker.close()
        yield worker.heard


# --- a false gateway, for a real worker --------------------------------------------------------------


class FalseGateway:
    """Sends one worker anything, and now and then a real request."""

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
        while self._socket.poll(WAIT_MS):
            self._worker, *frames = self._socket.recv_multipart()
            message, _ = wire.decode_to_gateway(frames)
            self.heard[type(message).__name__] += 1
            if isinstance(message, Hello):
                self._send(Welcome(incarnation=self.name, version=PROTOCOL_VERSION))
            if done(message):
                return
        raise AssertionError("the worker says nothing any more")

    def _send(self, message: Message) -> None:
        self._socket.send_multipart([self._worker, *wire.encode(message)])

    def speak(self, dice: random.Random, count: int) -> None:
        """So many messages; whatever they have begun is cancelled in the end."""
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

    def ask(self) -> str:
        """What the worker answers to a real request."""
        self._probes += 1
        id, text = f"probe-{self._probes}", ""
        request = Generate(incarnation=self.name, id=id, sampling=Sampling(seed=1), prompt=PROBE)
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
    """The request that a worker takes these for, if any; None: it would rightly end itself."""
    try:
        message, _ = wire.decode_to_worker(frames)
    except wire.WireError:
        return ""
    if isinstance(message, Rejected):
        return None
    return message.id if isinstance(message, Generate) else ""


def at_worker(folder: Path, frames: int, seed: int, module: str = "worker.fake") -> Outcome:
    """So many messages to a worker, which is asked something real after each batch."""
    dice, outcome = random.Random(seed), Outcome()
    endpoint = f"ipc://{folder}/false"
    with zmq.Context[zmq.Socket[bytes]]() as context:
        gateway = FalseGateway(context, endpoint)
        worker = Process("worker", [module, "--endpoint", endpoint], folder)
        health = Health([worker], boundary="could not be prepared")
        try:
            gateway.meet()
            expected = scripted(PROBE, 5) if module == "worker.fake" else gateway.ask()
            for number in range(frames // BATCH):
                if number == frames // BATCH // 10:
                    health.warm()
                gateway.speak(dice, BATCH)
                if (text := gateway.ask()) != expected:
                    outcome.wrong.append(f"batch {number}: {text!r} instead of {expected!r}")
                outcome.answered += 1
                outcome.sent += BATCH
            outcome.wrong += health.complaints()
        except (AssertionError, zmq.ZMQError) as error:
            outcome.wrong.append(f"after {outcome.sent}: {error!r}: {worker.log()[-3000:]}")
        finally:
            gateway.close()
            worker.stop()
        outcome.heard, outcome.growth_bytes = gateway.heard, health.growth_bytes
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="for each end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--end", choices=["gateway", "worker", "both"], default="both")
    parser.add_argument(
        "--worker", default="worker.fake", help="module of the worker; `worker`: the real one"
    )
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    failed = False
    for end in ("gateway", "worker") if given.end == "both" else (given.end,):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            if end == "gateway":
                outcome = at_gateway(Path(folder), given.frames, given.seed)
            else:
                outcome = at_worker(Path(folder), given.frames, given.seed, given.worker)
        took_s = time.monotonic() - began
        print(
            f"{outcome.sent} messages to the {end} in {took_s:.0f} s, {outcome.answered} real answers beside"
        )
        print(dict(outcome.heard))
        print({name: f"{growth / 2**20:+.1f} MiB" for name, growth in outcome.growth_bytes.items()})
        print(f"{len(outcome.wrong)} wrong", *outcome.wrong[:10], sep="\n", flush=True)
        failed |= bool(outcome.wrong)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
