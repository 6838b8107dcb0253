"""Ranks of a set that are killed, or stopped, under streams: `python -m tests.faults.ranks --strikes 25`.

`roundhouse serve` with a tiny model over two ranks on loopback. A strike is at one rank, in one phase: while
prompts are run, while answers are, while the set loads, or while it has nothing to do. Every answer must be
that of an undisturbed run, no process may be left of a set that was struck, and the next one has the same
ports.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
import psutil

from tests.faults.streams import Client, ask, wait_for, wait_until_flowing, wait_until_taken
from tests.models.fixtures import model_folder
from tests.ports import free_port, free_ports
from tests.system import NO_TLS, Process, eventually

Phase = Literal["prefill", "decode", "load", "idle"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "load", "idle")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)

MODEL = "dense"
ANSWER: dict[str, object] = {"ignore_eos": True, "max_tokens": 300, "temperature": 0}
READY_S_MAX = 120.0
ANSWER_S_MAX = 180.0
GONE_S_MAX = 60.0
LOAD_S_MAX = 4.0
REFUSED = 503
JOIN_S_MAX = 20.0
"""A rank that is stopped before it has come is missed so late."""


@dataclass(slots=True)
class Outcome:
    """`took_s`: from each strike until all had their answers and the next set served; by what was struck."""

    strikes: int = 0
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    took_s: dict[str, list[float]] = field(default_factory=dict)


class Set:
    """A server whose model two processes run."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        mode: str = "tensor",
        ranks: int = 2,
        python: str | None = None,
        falls: bool = False,
    ) -> None:
        """`python`: the interpreter of all ranks but the first. `falls`: to the same model, alone."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        hosts = folder / "hosts.json"
        host = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "python": python}
        hosts.write_text(json.dumps([host] * ranks))
        told = [f"--port={self.port}", f"--endpoint=ipc://{folder}/line", f"--model={model_folder(MODEL)}"]
        told += [f"--hosts={hosts}", f"--split={mode}", f"--hosts-port={free_ports(ranks)[0]}"]
        told += ["--deaths-max=1000", "--restart-delay-max=0.2", *flags]
        told += [f"--fallback={model_folder(MODEL)}"] if falls else []
        environ = {"ROUNDHOUSE_JOIN_TIMEOUT": str(JOIN_S_MAX)}
        self.ranks = ranks
        self.process = Process("serve", ["deploy", "serve", *told], folder, environ)

    def wait_ready(self) -> None:
        eventually(self.is_ready, within_s=READY_S_MAX, what="ready")

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5, verify=NO_TLS).status_code == 200
        except httpx.TransportError:
            return False

    def knows(self, pid: int) -> bool:
        """Whether the gateway has met this worker."""
        status = httpx.get(f"{self.url}/v1/status", timeout=5, verify=NO_TLS).json()
        return any(worker["pid"] == pid for worker in status["workers"])

    def members(self) -> list[psutil.Process]:
        """The processes of the set, as far as they are there, the first rank's first."""
        found: list[tuple[bool, psutil.Process]] = []
        for child in self.process.stats.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if "worker" in words and child.status() != psutil.STATUS_ZOMBIE:
                    found.append((not any(word.startswith("--hosts=") for word in words), child))
        return [child for _, child in sorted(found, key=lambda pair: pair[0])]

    def whole(self) -> list[psutil.Process]:
        """All of its processes, once they are there."""
        return eventually(
            lambda: members if len(members := self.members()) == self.ranks else None,
            within_s=READY_S_MAX,
            what=f"{self.ranks} ranks",
        )


@contextlib.contextmanager
def served_set(
    folder: Path,
    *flags: str,
    mode: str = "tensor",
    python: str | None = None,
    falls: bool = False,
) -> Iterator[Set]:
    """Ready; gone afterwards, with all that it has started."""
    served = Set(folder, *flags, mode=mode, python=python, falls=falls)
    members: list[psutil.Process] = []
    try:
        served.wait_ready()
        yield served
        members = served.members() if served.process.running else []
    finally:
        served.process.stop()
    assert_gone(members)


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    """None of them is left, nor is stopped."""
    _, alive = psutil.wait_procs(processes, timeout=GONE_S_MAX)
    assert not alive, f"left behind: {alive}"


class Siege:
    """Strikes at a set, and what its clients got."""

    def __init__(self, served: Set, streams: int, seed: int = 0) -> None:
        self.outcome = Outcome()
        self._served = served
        self._dice = random.Random(seed)
        self._questions = [f"Count from {first} to 200." for first in range(streams)]
        self._long = [f"{question} {'Take your time. ' * 60}" for question in self._questions]
        self._right = dict.fromkeys((*self._questions, *self._long), "")
        for questions in (self._questions, self._long):
            clients = self._asked(questions)
            wait_for(clients, ANSWER_S_MAX)
            self._right |= {q: client.texts[0] for q, client in zip(questions, clients, strict=True)}

    def strike(self, phase: Phase, rank: int, number: signal.Signals) -> None:
        """Once; then all is well again, and everybody has what is right."""
        questions = self._long if phase == "prefill" else self._questions
        clients = [] if phase == "idle" else self._aboard(questions)
        members = self._served.whole()
        if clients and phase != "prefill":
            wait_until_flowing(clients)
        if phase == "load":
            members[0].kill()
            members = [*self._loading(members), *members]
        began = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):  # its set has met its end without us
            members[rank].send_signal(number)
        if phase == "idle":
            eventually(lambda: not self._served.is_ready(), within_s=GONE_S_MAX, what="noticed")
            clients = self._asked_when_ready(questions)
        wait_for(clients, ANSWER_S_MAX)
        self._served.wait_ready()
        what = f"{number.name} of rank {rank} in {phase}"
        self.outcome.took_s.setdefault(what, []).append(time.monotonic() - began)
        self._judge(what, questions, clients, members)

    def _loading(self, before: Sequence[psutil.Process]) -> list[psutil.Process]:
        """A set on its way, at some point of it."""
        eventually(lambda: not self._served.is_ready(), within_s=GONE_S_MAX, what="noticed")
        psutil.wait_procs(before, timeout=GONE_S_MAX)
        members = self._served.whole()
        # One that is stopped before the gateway knows it is missed by nobody, as any worker would be.
        eventually(lambda: self._served.knows(members[0].pid), within_s=GONE_S_MAX, what="connected")
        time.sleep(self._dice.uniform(0, LOAD_S_MAX))
        return members

    def _asked(self, questions: Sequence[str]) -> list[Client]:
        return [ask(self._served.url, question, **ANSWER) for question in questions]

    def _aboard(self, questions: Sequence[str]) -> list[Client]:
        """All with the gateway. Who comes while it takes the worker for silent, which a busy machine may make
        of it, is refused, as is right, and comes again."""
        while True:
            clients = self._asked_when_ready(questions)
            wait_until_taken(self._served.url, clients)
            if not any(client.status == REFUSED for client in clients):
                return clients
            wait_for(clients, ANSWER_S_MAX)

    def _asked_when_ready(self, questions: Sequence[str]) -> list[Client]:
        self._served.wait_ready()
        return self._asked(questions)

    def _judge(
        self, what: str, questions: Sequence[str], clients: Sequence[Client], struck: Sequence[psutil.Process]
    ) -> None:
        self.outcome.strikes += 1
        _, alive = psutil.wait_procs(struck, timeout=GONE_S_MAX)
        self.outcome.wrong += [f"{what}: left behind {process}" for process in alive]
        for question, client in zip(questions, clients, strict=True):
            self.outcome.answers += 1
            said = client.texts[0] if client.failure is None and client.error is None else client.read[-300:]
            if said != self._right[question]:
                self.outcome.wrong.append(f"{what}: {question[:20]}: {said!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strikes", type=int, default=25, help="of each signal at each rank in each phase")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served_set(Path(folder)) as served:
        siege = Siege(served, given.streams, given.seed)
        for _ in range(given.strikes):
            for phase, rank, number in itertools.product(PHASES, range(2), SIGNALS):
                siege.strike(phase, rank, number)
        outcome = siege.outcome
    print(f"{outcome.strikes} strikes, {outcome.answers} answers, {len(outcome.wrong)} wrong")
    for what, took_s in outcome.took_s.items():
        print(f"{what}: well again after {statistics.median(took_s):.1f} s, at most {max(took_s):.1f} s")
    for wrong in outcome.wrong[:10]:
        print(wrong)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
