"""Mutated frames for a live gateway and a live worker: `python -m tests.faults.frames --frames 1000000`.

Each end is the real process at a real socket; its peer is simulated. The process must count and drop the
frames that it cannot read, stay alive, not grow, log little, and answer real requests meanwhile.
"""

from __future__ import annotations

import argparse
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from tests.faults.health import Health, Neighbour
from tests.faults.mutated_peers import FalseGateway, FalseWorker
from tests.faults.runner import run_program
from tests.faults.streams import Client, scripted
from tests.system import Process, chat_body, running_system

BATCH = 200
LIVES = 100
"""Batches after which a simulated worker ends and another one connects, unless it is rejected before."""
VICTIMS = 4
GATEWAY_FLAGS = ("--hung-timeout", "86400", "--failover-timeout", "2")
"""Prevent the gateway from killing the process id that a simulated worker reports."""
PROBE = "a real one !tokens=5"


@dataclass(slots=True)
class Outcome:
    """The results of a run. `answered`: the number of real requests that were answered meanwhile."""

    sent: int = 0
    answered: int = 0
    heard: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def ask_on(url: str, over: threading.Event) -> Counter[int]:
    """Send requests to the simulated worker until `over` is set. Each must end, no matter how; return its
    status."""
    statuses = Counter[int]()
    body = chat_body("anything", stream=True, model=FalseWorker.MODEL, max_tokens=50)
    while not over.wait(0.01):
        client = Client(url, body)
        client.run()
        statuses[client.status] += 1
    return statuses


def at_gateway(folder: Path, frames: int, seed: int) -> Outcome:
    """Send `frames` messages to a gateway, which serves real clients with a real worker meanwhile."""
    outcome, over = Outcome(), threading.Event()
    with running_system(folder, GATEWAY_FLAGS) as system, zmq.Context[zmq.Socket[bytes]]() as context:
        system.start_ready_worker("--name", "real")
        health = Health([system.gateway, *system.workers])
        with Neighbour(system.url, "real") as neighbour, ThreadPoolExecutor(VICTIMS) as pool:
            victims = [pool.submit(ask_on, system.url, over) for _ in range(VICTIMS)]
            try:
                lives = _live_falsely(context, system.endpoint, frames // BATCH, random.Random(seed), health)
                outcome.heard = sum(lives, Counter())
            finally:
                over.set()
        outcome.sent, outcome.answered = frames // BATCH * BATCH, neighbour.streams
        outcome.wrong = health.complaints() + [neighbour.wrong][: bool(neighbour.wrong)]
        for victim in victims:
            outcome.heard.update({f"victims told {status}": n for status, n in victim.result().items()})
        status = system.http.get("/v1/status").json()["gateway"]
        outcome.heard.update({f"dropped as {name}": count for name, count in status["dropped"].items()})
    return outcome


def _live_falsely(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, batches: int, dice: random.Random, health: Health
) -> Iterator[Counter[str]]:
    """Run one simulated worker after another, and yield the messages that each received."""
    number = 0
    while number < batches:
        worker, ends = FalseWorker(context, endpoint), min(number + LIVES, batches)
        # The gateway reads nothing more of one that it has rejected.
        while number < ends and not worker.heard["Rejected"]:
            if number == batches // 10:
                health.warm()
            worker.speak(dice, BATCH)
            number += 1
        worker.close()
        yield worker.heard


def at_worker(folder: Path, frames: int, seed: int) -> Outcome:
    """Send `frames` messages to a worker, with a real request after each batch."""
    dice, outcome = random.Random(seed), Outcome()
    endpoint = f"ipc://{folder}/false"
    with zmq.Context[zmq.Socket[bytes]]() as context:
        gateway = FalseGateway(context, endpoint)
        worker = Process("worker", ["tests.scripted_worker", "--endpoint", endpoint], folder)
        health = Health([worker], boundary="could not be prepared")
        try:
            gateway.meet()
            expected = scripted(PROBE, 5)
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
        outcome.heard = gateway.heard
    return outcome


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run the test at both ends."""
    wrong = []
    for end, run in (("gateway", at_gateway), ("worker", at_worker)):
        (folder / end).mkdir()
        outcome = run(folder / end, given.frames, given.seed)
        print(f"{outcome.sent} messages to the {end}, {outcome.answered} real answers", flush=True)
        print(dict(outcome.heard))
        wrong += [f"{end}: {what}" for what in outcome.wrong]
    return wrong


if __name__ == "__main__":
    frames = {"type": int, "default": 1_000_000, "help": "for each end"}
    run_program(__doc__, check, {"--frames": frames, "--seed": 0})
