"""Workers that come to harm at random instants under streams: `python -m tests.faults.failover --faults 100`.

A gateway, one worker at a time, and clients who ask again as soon as they have their answers, streamed and
whole, greedy and seeded, one choice and two, half of them with images, thinking, calling tools and held to
forms. Every answer must be that of an undisturbed run. Who comes while no worker is ready is refused, as
ever, and asks again.

`--life`: how long, at most, a worker is left alone. Requests that take longer than three lives are taken for
what kills.

`--fault`: the worker is killed, is stopped, its model thread hangs, or the line between it and the gateway
loses, doubles and swaps messages (then `--faults` counts seconds). `--model`: scripted, or embedded, which is
the real engine.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import stalling
from tests.faults.line import Kind, harmed
from tests.faults.questions import Question, Source, of_the_embedded, of_the_scripted
from tests.faults.streams import Client
from tests.system import Process, System, eventually, running_system

CLIENTS = 32
STEP_MS = 5
KNOWN_ANSWERS = 40
UNDISTURBED_S_MAX = 2.0
REFUSED_S = 0.05
"""How long a client that was refused waits before it asks again."""
SHARE_HARMED = 0.02
HARMED_HOW: tuple[Kind, ...] = ("lost", "doubled", "swapped")
REFUSED = {"worker_unavailable", "model_loading"}
FLAGS = {
    "scripted": ["--step-ms", str(STEP_MS), "--max-running", str(CLIENTS), "--images"],
    "embedded": ["--max-running", str(CLIENTS)],
}
MODULES = {"scripted": "worker.fake", "embedded": "worker"}

Span = tuple[float, float]


@dataclass(slots=True)
class Outcome:
    """What became of it all. `absences`: from the harm done to a worker until another one was ready.
    `drafted`: tokens that were tried for what was answered, right and wrong ones. `wrong`: the first words of
    what went wrong."""

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
        """Of each pause in which a worker was absent, how long it was without that."""
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
    """Asks, checks, and asks again until it has been judged once and is told that it is over."""

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


@dataclass(frozen=True, slots=True)
class Stage:
    """Where workers come and go, and how they start. `known`: how many questions are asked beforehand.
    `drafts`: they make them."""

    system: System
    model: str = "scripted"
    known: int = KNOWN_ANSWERS
    endpoint: str | None = None
    stall_timeout_s: float | None = None
    drafts: bool = False

    def start(self) -> Process:
        """A worker that serves."""
        flags, module, env = list(FLAGS[self.model]), MODULES[self.model], {}
        if self.drafts:
            # Where they do not pay, as on most processors, they would be left.
            flags, module = [*flags, "--speculation", "auto"], "tests.eager"
        if self.stall_timeout_s is not None:
            flags += ["--stall-timeout", str(self.stall_timeout_s)]
            env[stalling.VARIABLE] = "worker.fake.__main__" if self.model == "scripted" else "worker.__main__"
            module = stalling.__name__
        worker = self.system.start_worker(*flags, module=module, env=env, endpoint=self.endpoint)
        eventually(lambda: worker.pid in self.pids("ready"), within_s=90, what="the worker is ready")
        return worker

    def pids(self, state: str) -> list[int]:
        """The processes of the workers that are in this state."""
        workers = self.system.http.get("/v1/status").json()["workers"]
        return [worker["pid"] for worker in workers if worker["state"] == state]

    def source(self, seed: int) -> Source:
        """Questions for the model, which serves."""
        if self.model == "scripted":
            return of_the_scripted
        return of_the_embedded(self.system.url, seed, self.known, predicted=self.drafts)


Harm = Callable[[Stage, Process], Process]
"""Does it to a worker, and starts the next one."""


def kill(stage: Stage, worker: Process) -> Process:
    worker.kill()
    worker.wait()
    return stage.start()


def stop(stage: Stage, worker: Process) -> Process:
    """It is stopped until another one has taken over, and has a last word then."""
    worker.kill(signal.SIGSTOP)
    successor = stage.start()
    eventually(lambda: worker.pid in stage.pids("silent"), within_s=30, what="the verdict")
    worker.stop()
    return successor


def stall(stage: Stage, worker: Process) -> Process:
    """Its model thread hangs; it ends itself."""
    worker.kill(signal.SIGUSR1)
    worker.wait()
    return stage.start()


def disturb(stage: Stage, worker: Process) -> Process:
    """Nothing but what the line does all the while."""
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
    """A gateway, and the way to it."""
    with running_system(folder, ["--silent-after", "1"] if fault == "stop" else []) as system:
        if fault == "line":
            with harmed(folder, system.endpoint, seed, HARMED_HOW, SHARE_HARMED) as line:
                yield Stage(system, model, known, endpoint=line.endpoint, drafts=drafts)
                assert line.counts["lost"] > 0
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
    """Harm so many workers under so many clients."""
    dice, over, total = random.Random(seed), threading.Event(), Outcome(faults)
    worker = stage.start()
    source = stage.source(seed)
    askers = [Asker(stage.system.url, random.Random(dice.random()), over, source) for _ in range(clients)]
    for asker in askers:
        asker.start()
    try:
        for _ in range(faults):
            time.sleep(dice.uniform(0, life_s))
            begun = time.monotonic()
            worker, before = harm(stage, worker), worker
            if worker is not before:
                total.absences.append((begun, time.monotonic()))
    finally:
        over.set()
        for asker in askers:
            asker.join()
            total.add(asker.outcome)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", "--kills", type=int, default=100)
    parser.add_argument("--fault", choices=HARMS, default="kill")
    parser.add_argument("--model", choices=MODULES, default="scripted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--life", type=float, default=UNDISTURBED_S_MAX, metavar="SECONDS")
    parser.add_argument("--drafts", action="store_true", help="of the embedded model: it makes drafts")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        staged(Path(folder), given.fault, given.model, given.seed, drafts=given.drafts) as stage,
    ):
        harm = HARMS[given.fault]
        outcome = run(stage, harm, given.faults, given.seed, given.clients, given.life)
    print(f"{outcome.faults} faults, {outcome.answers} answers, {outcome.refusals} refusals between workers")
    if given.drafts:
        print(f"drafted tokens of these answers: {outcome.drafted[0]} right, {outcome.drafted[1]} wrong")
    if beyond := outcome.beyond_absence_s():
        p99 = beyond[int(0.99 * len(beyond))]
        print(f"{len(beyond)} pauses; beyond the time in which no worker was ready:")
        print(f"  median {statistics.median(beyond):.2f} s, p99 {p99:.2f} s, longest {beyond[-1]:.2f} s")
    print(f"longest pause {outcome.pause_s_max:.2f} s, {len(outcome.wrong)} wrong")
    for wrong in outcome.wrong[:5]:
        print(wrong)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
