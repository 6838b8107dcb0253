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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from tests.faults.beside import Health, Neighbour
from tests.faults.lies import FalseGateway, FalseWorker
from tests.faults.streams import Client, scripted
from tests.system import Process, chat_body, running_system

BATCH = 200
LIVES = 100
"""Batches after which a false worker ends, and another one comes."""
VICTIMS = 4
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
            expected = scripted(PROBE, 5) if module == "worker.fake" else gateway.ask(PROBE)
            for number in range(frames // BATCH):
                if number == frames // BATCH // 10:
                    health.warm()
                gateway.speak(dice, BATCH)
                if (text := gateway.ask(PROBE)) != expected:
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
