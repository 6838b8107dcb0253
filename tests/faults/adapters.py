"""Adapters that come and go under streams: `python -m tests.faults.adapters --seconds 60 --kills 6`.

The system has a gateway and one worker at a time, which runs the real engine. Clients ask the base and its
lasting adapters. Meanwhile *visitors*, adapters that are loaded, asked and removed while their streams still
run, come and go. With `--kills`, the worker is killed at random instants, and another one is started with the
settings of the first. Every answer must equal the one that was recorded without disturbance, and no stream
may fail. While no worker is ready, clients are refused and retry.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.failover import REFUSED, REFUSED_S, Outcome, asking
from tests.faults.questions import Question
from tests.faults.runner import run_program
from tests.faults.streams import Client, wait_for
from tests.models.adapters import Recipe, make_adapter
from tests.models.fixtures import model_folder
from tests.system import Process, System, chat_body, eventually, running_system

MODEL = "dense"
LASTING, VISITORS = 4, 3
CLIENTS = 12
TEXTS = ("steam", "signal wagon signal", "turntable " * 30)
TOKENS = (8, 24, 60)
VISIT_STREAMS = 2
START_S_MAX = 90.0
RETRY_S_MAX = 60.0


@dataclass(slots=True)
class Visits(Outcome):
    """The results of a run. `visits`: adapters that were loaded, asked and removed."""

    visits: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class Stage:
    """A system whose workers are replaced. `folders`: of all adapters."""

    system: System
    folders: Mapping[str, Path]

    @property
    def lasting(self) -> list[str]:
        return [name for name in self.folders if name.startswith("lasting")]

    @property
    def visitors(self) -> list[str]:
        return [name for name in self.folders if name.startswith("visitor")]

    def start(self) -> Process:
        """Start a worker and wait until it is ready."""
        flags = [f"--adapter={name}={self.folders[name]}" for name in self.lasting]
        flags += ["--model", str(model_folder(MODEL)), "--max-running", str(CLIENTS + 2 * VISIT_STREAMS)]
        worker = self.system.start_worker(*flags, module="worker")
        eventually(lambda: worker.pid in self._ready(), within_s=START_S_MAX, what="the worker is ready")
        return worker

    def _ready(self) -> list[int]:
        workers = self.system.http.get("/v1/status").json()["workers"]
        return [worker["pid"] for worker in workers if worker["state"] == "ready"]

    def add(self, name: str) -> None:
        """Load an adapter, as soon as a worker is ready and the name is free again."""
        told = {"name": name, "folder": str(self.folders[name])}

        def added() -> bool:
            answer = self.system.http.post("/v1/adapters", json=told)
            is_free = "still in use" not in answer.text and "was lost" not in answer.text
            assert answer.status_code in (200, 503) or not is_free, answer.text
            return answer.status_code == 200

        eventually(added, within_s=RETRY_S_MAX, what=f"{name} is loaded")

    def remove(self, name: str) -> None:
        self.system.http.delete(f"/v1/adapters/{name}").raise_for_status()


def body_of(adapter: str, number: int, *, stream: bool) -> dict[str, object]:
    model = f"{MODEL}:{adapter}" if adapter else MODEL
    fields = {"model": model, "max_tokens": TOKENS[number], "temperature": 0, "ignore_eos": True}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    return chat_body(TEXTS[number], **fields, stream=stream, **usage)


def recorded(stage: Stage, adapters: Sequence[str]) -> dict[tuple[str, int], list[str]]:
    """Return the undisturbed answers to all texts."""
    found = {}
    for adapter in adapters:
        for number in range(len(TEXTS)):
            client = Client(stage.system.url, body_of(adapter, number, stream=False))
            client.run()
            found[adapter, number] = client.texts
    assert len({tuple(texts) for texts in found.values()}) > len(adapters)
    return found


def question_of(known: Mapping[tuple[str, int], list[str]], adapter: str, dice: random.Random) -> Question:
    number = dice.randrange(len(TEXTS))
    body = body_of(adapter, number, stream=dice.random() < 0.7)
    return Question(body, [""], known[adapter, number], [[]], ["length"], TOKENS[number])


def visit(stage: Stage, name: str, known: Mapping[tuple[str, int], list[str]], outcome: Visits) -> None:
    """Load an adapter, ask it, and remove it while its streams run."""
    stage.add(name)
    number = len(TEXTS) - 1
    streams = [Client(stage.system.url, body_of(name, number, stream=True)) for _ in range(VISIT_STREAMS)]
    for each in streams:
        each.start()
    eventually(lambda: all(s.status or s.failure for s in streams), within_s=RETRY_S_MAX, what="answers")
    stage.remove(name)
    wait_for(streams, RETRY_S_MAX)
    for each in streams:
        if each.status == 503 and each.error in REFUSED:
            outcome.refusals += 1
            time.sleep(REFUSED_S)
        elif each.status != 200 or each.texts != known[name, number]:
            outcome.wrong.append(f"{name}: {bytes(each.read[-300:])!r}")
        else:
            outcome.answers += 1
    outcome.visits += 1


def run(stage: Stage, seconds: float, kills: int, seed: int, clients: int = CLIENTS) -> Visits:
    """Let adapters come and go for `seconds`, with `kills` kills evenly in between."""
    dice, outcome = random.Random(seed), Visits()
    worker = stage.start()
    for name in stage.visitors:
        stage.add(name)
    known = recorded(stage, ["", *stage.folders])
    for name in stage.visitors:
        stage.remove(name)
    names, over = ["", *stage.lasting], threading.Event()

    def come_and_go() -> None:
        turns = random.Random(seed + 1)
        try:
            while not over.is_set():
                visit(stage, turns.choice(stage.visitors), known, outcome)
        except Exception as error:
            outcome.wrong.append(f"a visit failed: {error!r}")

    visits = threading.Thread(target=come_and_go)
    source = lambda chance: question_of(known, chance.choice(names), chance)  # noqa: E731
    with asking(stage.system.url, dice, clients, outcome, source):
        visits.start()
        began = time.monotonic()
        for number in range(1, kills + 1):
            over.wait(max(0.0, began + (number - dice.random()) * seconds / (kills + 1) - time.monotonic()))
            worker.kill()
            worker.wait()
            worker = stage.start()
            outcome.faults += 1
        over.wait(max(0.0, began + seconds - time.monotonic()))
        over.set()
        visits.join()
    return outcome


def staged(system: System, folder: Path, lasting: int = LASTING, visitors: int = VISITORS) -> Stage:
    """Make the adapters of a run."""
    names = [f"lasting{n}" for n in range(lasting)] + [f"visitor{n}" for n in range(visitors)]
    folders = {
        name: make_adapter(model_folder(MODEL), folder / name, Recipe(2 + place, 3.0, place))
        for place, name in enumerate(names)
    }
    return Stage(system, folders)


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run the adapters under a new system, and print what happened."""
    with running_system(folder) as system:
        outcome = run(staged(system, folder), given.seconds, given.kills, given.seed, given.clients)
    print(f"{outcome.visits} adapters loaded and removed, {outcome.faults} kills, {outcome.answers} answers")
    print(f"{outcome.refusals} refused and repeated, longest pause {outcome.pause_s_max:.2f} s")
    return [*outcome.wrong, *(["refused without a kill"] if outcome.refusals and not outcome.faults else [])]


if __name__ == "__main__":
    options = {"--seconds": 60.0, "--kills": 0, "--seed": 0, "--clients": CLIENTS}
    run_program(__doc__, check, options)
