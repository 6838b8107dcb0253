"""Worker faults at random instants under streams: `python -m tests.faults.failover --faults 100`.

The system has a gateway and one worker at a time. Clients send request after request: streamed or not, greedy
or seeded, with one choice or two, half of them with images, reasoning, tool calls or structured output. Every
answer must equal that of an undisturbed run. While no worker is ready, clients are refused and retry.

`--life`: the maximum time between faults. A request that takes longer than three such periods is quarantined
as the cause of the crashes.

`--fault`: the worker is killed or stopped, its model thread hangs, or the connection to the gateway loses,
duplicates and reorders messages (a fault is one that is lost). `--model`: scripted, or embedded, which uses
the real engine.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import stalling
from tests.faults.line import Kind, Line, harmed
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
SHARE_HARMED = 0.02
HARMED_HOW: tuple[Kind, ...] = ("lost", "doubled", "swapped")
REFUSED = {"worker_unavailable", "model_loading"}
FLAGS = {
    "scripted": ["--step-ms", str(STEP_MS), "--max-running", str(CLIENTS), "--images"],
    "embedded": ["--max-running", str(CLIENTS)],
}
MODULES = {"scripted": "tests.scripted_worker", "embedded": "worker"}

Span = tuple[float, float]


@dataclass(slots=True)
class Outcome:
    """The results of a run. `absences`: from each fault until another worker was ready. `drafted`: accepted
    and rejected draft tokens of the answers. `wrong`: the beginnings of wrong answers."""

    faults: int = 0
    answers: int = 0
    refusals: int = 0
    drafted: tuple[int, int] = (0, 0)
    pauses: list[Span] = field(default_factory=list)
    absences: list[Span] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def pause_s_max(self) -> float:
        return max((end - begin for begin, end in self.pauses), default=0.0)

    def beyond_absence_s(self) -> list[float]:
        """Return the pauses of streams without a ready worker, minus the time until one was ready."""
        found = []
        for begin, end in self.pauses:
            absent = sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.absences)
            if absent:
                found.append(end - begin - absent)
        return sorted(found)

    def add(self, other: Outcome) -> None:
        self.answers += other.answers
        self.refusals += other.refusals
        self.drafted = self.drafted[0] + other.drafted[0], self.drafted[1] + other.drafted[1]
        self.pauses += other.pauses
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
            right, wrong = client.drafted
            outcome.drafted = outcome.drafted[0] + right, outcome.drafted[1] + wrong
            outcome.pauses += client.pauses
        except Exception as error:
            outcome.wrong.append(f"{question.body}: {error!r}: {client.read[-200:]!r}")


@contextlib.contextmanager
def asking(
    url: str, dice: random.Random, clients: int, total: Outcome, source: Source = of_the_scripted
) -> Iterator[None]:
    """Run clients until exit, and then add their outcomes to `total`."""
    over = threading.Event()
    askers = [Asker(url, random.Random(dice.random()), over, source) for _ in range(clients)]
    for asker in askers:
        asker.start()
    try:
        yield
    finally:
        over.set()
        for asker in askers:
            asker.join()
            total.add(asker.outcome)


@dataclass(frozen=True, slots=True)
class Stage:
    """A system whose workers are replaced. `known`: the number of questions whose answers are recorded first.
    `line`: the faulty connection of the workers. `drafts`: workers speculate."""

    system: System
    model: str = "scripted"
    known: int = KNOWN_ANSWERS
    line: Line | None = None
    stall_timeout_s: float | None = None
    drafts: bool = False

    def start(self) -> Process:
        """Start a worker and wait until it is ready."""
        flags, module, env = list(FLAGS[self.model]), MODULES[self.model], {}
        if self.drafts:
            # Without `tests.eager`, drafts would be disabled where they do not pay, as on most CPUs.
            flags, module = [*flags, "--speculation", "auto"], "tests.eager"
        if self.stall_timeout_s is not None:
            flags += ["--stall-timeout", str(self.stall_timeout_s)]
            env[stalling.VARIABLE] = (
                "tests.scripted_worker.__main__" if self.model == "scripted" else "worker.__main__"
            )
            module = stalling.__name__
        endpoint = None if self.line is None else self.line.endpoint
        worker = self.system.start_worker(*flags, module=module, env=env, endpoint=endpoint)
        eventually(lambda: worker.pid in self.pids("ready"), within_s=90, what="the worker is ready")
        return worker

    def pids(self, state: str) -> list[int]:
        """Return the process ids of the workers in this state."""
        workers = self.system.http.get("/v1/status").json()["workers"]
        return [worker["pid"] for worker in workers if worker["state"] == state]

    def source(self, seed: int) -> Source:
        """Return a source of questions for the model, which must be ready."""
        if self.model == "scripted":
            return of_the_scripted
        return of_the_embedded(self.system.url, seed, self.known, predicted=self.drafts)


Harm = Callable[[Stage, Process], Process]
"""A function that harms a worker and starts the next one."""


def kill(stage: Stage, worker: Process) -> Process:
    worker.kill()
    worker.wait()
    return stage.start()


def stop(stage: Stage, worker: Process) -> Process:
    """Stop the worker until another one has taken over, then let it continue and send its messages."""
    worker.kill(signal.SIGSTOP)
    successor = stage.start()
    eventually(lambda: worker.pid in stage.pids("silent"), within_s=30, what="the worker is silent")
    worker.stop()
    return successor


def stall(stage: Stage, worker: Process) -> Process:
    """Let the model thread hang, so that the worker ends itself."""
    worker.kill(signal.SIGUSR1)
    worker.wait()
    return stage.start()


def disturb(stage: Stage, worker: Process) -> Process:
    """Wait until the connection, which is faulty itself, has lost another message."""
    line = stage.line
    assert line is not None
    lost = line.counts["lost"]
    eventually(lambda: line.counts["lost"] > lost, within_s=90, what="a message is lost")
    return worker


HARMS: dict[str, Harm] = {"kill": kill, "stop": stop, "stall": stall, "line": disturb}


@contextlib.contextmanager
def staged(
    folder: Path,
    fault: str,
    model: str = "scripted",
    seed: int = 0,
    known: int = KNOWN_ANSWERS,
    *,
    drafts: bool = False,
) -> Iterator[Stage]:
    """Run a gateway, and yield its stage."""
    with running_system(folder, ["--silent-after", "1"] if fault == "stop" else []) as system:
        if fault == "line":
            with harmed(folder, system.endpoint, seed, HARMED_HOW, SHARE_HARMED) as line:
                yield Stage(system, model, known, line=line, drafts=drafts)
                for worker in system.workers:
                    worker.stop()
        else:
            stall_timeout_s = 1.0 if fault == "stall" else None
            yield Stage(system, model, known, stall_timeout_s=stall_timeout_s, drafts=drafts)


def run(
    stage: Stage,
    harm: Harm,
    faults: int,
    seed: int,
    clients: int = CLIENTS,
    life_s: float = UNDISTURBED_S_MAX,
) -> Outcome:
    """Harm `faults` workers while `clients` clients send requests."""
    dice, total = random.Random(seed), Outcome(faults)
    worker = stage.start()
    source = stage.source(seed)
    with asking(stage.system.url, dice, clients, total, source):
        for _ in range(faults):
            time.sleep(dice.uniform(0, life_s))
            begun = time.monotonic()
            worker, before = harm(stage, worker), worker
            if worker is not before:
                total.absences.append((begun, time.monotonic()))
    return total


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run the faults on a new stage, and print the pauses."""
    with staged(folder, given.fault, given.model, given.seed, drafts=given.drafts) as stage:
        harm = HARMS[given.fault]
        outcome = run(stage, harm, given.faults, given.seed, given.clients, given.life)
    print(f"{outcome.faults} faults, {outcome.answers} answers, {outcome.refusals} refusals between workers")
    if given.drafts:
        print(f"draft tokens of these answers: {outcome.drafted[0]} accepted, {outcome.drafted[1]} rejected")
    if beyond := outcome.beyond_absence_s():
        p99 = beyond[int(0.99 * len(beyond))]
        print(f"{len(beyond)} pauses; minus the time without a ready worker:")
        print(f"  median {statistics.median(beyond):.2f} s, p99 {p99:.2f} s, longest {beyond[-1]:.2f} s")
    print(f"longest pause {outcome.pause_s_max:.2f} s")
    return outcome.wrong


if __name__ == "__main__":
    options = {
        "--faults --kills": 100,
        "--fault": {"choices": HARMS, "default": "kill"},
        "--model": {"choices": MODULES, "default": "scripted"},
        "--seed": 0,
        "--clients": CLIENTS,
        "--life": {"type": float, "default": UNDISTURBED_S_MAX, "metavar": "SECONDS"},
        "--drafts": {"action": "store_true", "help": "speculate with the embedded model"},
    }
    run_program(__doc__, check, options)
