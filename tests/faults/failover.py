"""Kills of workers at random instants under streams: `python -m tests.faults.failover --kills 100`.

The system has a gateway and one worker at a time. Clients send request after request: streamed or not, greedy
or seeded, with one choice or two, half of them with images, reasoning, tool calls or structured output. Every
answer must equal that of an undisturbed run. While no worker is ready, clients are refused and retry.

`--life`: the maximum time between kills. After every second one each client gets an answer first: a request
without progress fails at the third crash, as its cause. `--model`: scripted, or embedded, which uses the real
engine.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.questions import Question, Source, of_the_embedded, of_the_scripted
from tests.faults.runner import run_program
from tests.faults.streams import Client
from tests.system import Process, System, eventually, running_system

CLIENTS = 32
STEP_MS = 5
KNOWN_ANSWERS = 40
UNDISTURBED_S_MAX = 2.0
REFUSED_S = 0.25
"""Delay before a refused client retries."""
REFUSED = {"worker_unavailable", "model_loading"}
FLAGS = {
    "scripted": ["--step-ms", str(STEP_MS), "--max-running", str(CLIENTS), "--images"],
    "embedded": ["--max-running", str(CLIENTS)],
}
MODULES = {"scripted": "tests.scripted_worker", "embedded": "worker"}


@dataclass(slots=True)
class Outcome:
    """The results of a run."""

    answers: int = 0
    refusals: int = 0
    pauses_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.answers += other.answers
        self.refusals += other.refusals
        self.pauses_s += other.pauses_s
        self.wrong += other.wrong


class Asker(threading.Thread):
    """A client that sends requests and checks the answers until the run ends, at least one."""

    def __init__(
        self, url: str, dice: random.Random, over: threading.Event, source: Source = of_the_scripted
    ) -> None:
        super().__init__()
        self._url, self._dice, self._over, self._source = url, dice, over, source
        self.outcome = Outcome()

    def run(self) -> None:
        while not self._over.is_set() or not (self.outcome.answers or self.outcome.wrong):
            question = self._source(self._dice)
            client = Client(self._url, question.body)
            client.run()
            self._judge(question, client)

    @property
    def judged(self) -> int:
        """Number of answers, right or wrong."""
        return self.outcome.answers + len(self.outcome.wrong)

    def _judge(self, question: Question, client: Client) -> None:
        outcome = self.outcome
        try:
            if client.status == 503 and client.error in REFUSED:
                outcome.refusals += 1
                time.sleep(REFUSED_S)
                return
            assert client.thoughts == question.thoughts
            assert client.texts == question.texts
            assert client.calls == question.calls
            assert client.reasons == question.reasons
            assert client.completion_tokens == question.tokens
            outcome.answers += 1
            outcome.pauses_s += [client.pause_s]
        except Exception as error:
            outcome.wrong.append(f"{question.body}: {error!r}: {client.read[-200:]!r}")


@contextlib.contextmanager
def asking(
    url: str, dice: random.Random, clients: int, total: Outcome, source: Source = of_the_scripted
) -> Iterator[list[Asker]]:
    """Run clients until exit, and then add their outcomes to `total`."""
    over = threading.Event()
    askers = [Asker(url, random.Random(dice.random()), over, source) for _ in range(clients)]
    for asker in askers:
        asker.start()
    try:
        yield askers
    finally:
        over.set()
        for asker in askers:
            asker.join()
            total.add(asker.outcome)


def await_answers(askers: list[Asker]) -> None:
    """Wait until each client has another answer."""
    before = [asker.judged for asker in askers]
    eventually(
        lambda: all(asker.judged > number for asker, number in zip(askers, before, strict=True)),
        within_s=120,
        what="each client has an answer",
    )


def start(system: System, model: str) -> Process:
    """Start a worker and wait until it is ready."""
    worker = system.start_worker(*FLAGS[model], module=MODULES[model])

    def ready() -> list[int]:
        workers = system.http.get("/v1/status").json()["workers"]
        return [worker["pid"] for worker in workers if worker["state"] == "ready"]

    eventually(lambda: worker.pid in ready(), within_s=90, what="the worker is ready")
    return worker


def run(
    system: System,
    model: str,
    kills: int,
    seed: int,
    clients: int = CLIENTS,
    life_s: float = UNDISTURBED_S_MAX,
    known: int = KNOWN_ANSWERS,
) -> Outcome:
    """Kill `kills` workers while `clients` clients send requests. `known`: the number of questions to the
    embedded model, whose answers are recorded first."""
    dice, total = random.Random(seed), Outcome()
    worker = start(system, model)
    source = of_the_scripted if model == "scripted" else of_the_embedded(system.url, seed, known)
    with asking(system.url, dice, clients, total, source) as askers:
        for number in range(kills):
            if number and number % 2 == 0:
                await_answers(askers)
            time.sleep(dice.uniform(0, life_s))
            worker.kill()
            worker.wait()
            worker = start(system, model)
    return total


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Make the kills in a new system, and print the pauses."""
    with running_system(folder) as system:
        outcome = run(system, given.model, given.kills, given.seed, given.clients, given.life)
    print(f"{given.kills} kills, {outcome.answers} answers, {outcome.refusals} refusals between workers")
    pauses_s = sorted(outcome.pauses_s)
    print(
        f"longest pause of an answer: median {statistics.median(pauses_s):.2f} s, most {pauses_s[-1]:.2f} s"
    )
    return outcome.wrong


if __name__ == "__main__":
    options = {
        "--kills": 100,
        "--model": {"choices": MODULES, "default": "scripted"},
        "--seed": 0,
        "--clients": CLIENTS,
        "--life": {"type": float, "default": UNDISTURBED_S_MAX, "metavar": "SECONDS"},
    }
    run_program(__doc__, check, options)
