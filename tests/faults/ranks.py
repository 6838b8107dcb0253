"""Kill or stop ranks of a model under streams: `python -m tests.faults.ranks --strikes 25`.

`roundhouse serve` runs a tiny model over two ranks on loopback. A strike hits one rank in one phase: prefill,
decode, load, or idle. Every answer must equal that of an undisturbed run. No process of the struck set may
remain, whatever its parent is, and the next set uses the same ports. Each strike is printed after recovery.
`--phases` and `--signals` select strikes, so that several of these programs can run in parallel.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.faults.runner import run_program
from tests.faults.sets import GONE_S_MAX, READY_S_MAX, Set, served_set
from tests.faults.streams import Client, ask, wait_for, wait_until_flowing, wait_until_taken
from tests.system import eventually

Phase = Literal["prefill", "decode", "load", "idle", "ahead"]
"""`ahead`: before the answers, for a signal whose effect shows under them."""
PHASES: tuple[Phase, ...] = ("prefill", "decode", "load", "idle")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)

ANSWER_TOKENS = 300
ANSWER: dict[str, Any] = {"ignore_eos": True, "max_tokens": ANSWER_TOKENS, "temperature": 0}
ANSWER_S_MAX = 180.0
LOAD_S_MAX = 4.0
REFUSED = 503
LOG_TOLD = 20_000
"""Characters of the log that are printed when a strike fails."""


@dataclass(slots=True)
class Outcome:
    """`wrong`: answers with a different text, and leaked processes. `failed`: answers that did not end
    correctly, or did not end at all. `refused`: requests refused with a Retry-After and repeated."""

    strikes: int = 0
    answers: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Siege:
    """Strikes at a set of ranks, with the answers of its clients."""

    def __init__(self, served: Set, streams: int, seed: int = 0, tokens: int = ANSWER_TOKENS) -> None:
        """`tokens`: length of each answer."""
        self.outcome = Outcome()
        self._answer = ANSWER | {"max_tokens": tokens}
        self._served = served
        self._dice = random.Random(seed)
        self._questions = [f"Count from {first} to 200." for first in range(streams)]
        self._long = [f"{question} {'Take your time. ' * 60}" for question in self._questions]
        self._right: dict[str, str] = {}

    def strike(self, phase: Phase, rank: int, number: signal.Signals) -> None:
        """Strike once, then wait for recovery and check all answers."""
        questions = self._long if phase == "prefill" else self._questions
        self._answer_undisturbed(questions)
        clients = [] if phase in ("idle", "ahead") else self._assigned(questions)
        members = self._served.whole()
        if clients and phase != "prefill":
            wait_until_flowing(clients)
        if phase == "load":
            members[0].kill()
            members = [*self._loading(members), *members]
        began = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):  # its set has already ended
            members[rank].send_signal(number)
        if phase == "idle":
            eventually(lambda: not self._served.is_ready(), within_s=GONE_S_MAX, what="noticed")
            clients = self._asked_when_ready(questions)
        if phase == "ahead":
            clients = self._assigned(questions)
        first = members[0].pid
        eventually(lambda: self._served.serves_after(first), within_s=READY_S_MAX, what="well again")
        for client in clients:
            client.join(max(0.0, began + ANSWER_S_MAX - time.monotonic()))
        self._judge(f"{number.name} of rank {rank} in {phase}", questions, clients, members)

    def _answer_undisturbed(self, questions: Sequence[str]) -> None:
        """Record the right answers, the first time that these questions are asked."""
        if questions[0] not in self._right:
            clients = self._asked(questions)
            wait_for(clients, ANSWER_S_MAX)
            self._right |= {q: client.texts[0] for q, client in zip(questions, clients, strict=True)}

    def _loading(self, before: Sequence[psutil.Process]) -> list[psutil.Process]:
        """Wait until a set loads, and return its processes at a random point of the load."""
        eventually(lambda: not self._served.is_ready(), within_s=GONE_S_MAX, what="noticed")
        psutil.wait_procs(before, timeout=GONE_S_MAX)
        members = self._served.whole()
        # The gateway would not notice the stop of a worker that has not connected yet.
        eventually(lambda: self._served.knows(members[0].pid), within_s=GONE_S_MAX, what="connected")
        time.sleep(self._dice.uniform(0, LOAD_S_MAX))
        return members

    def _asked(self, questions: Sequence[str]) -> list[Client]:
        return [ask(self._served.url, question, **self._answer) for question in questions]

    def _assigned(self, questions: Sequence[str]) -> list[Client]:
        """Send all requests and wait until the gateway has them.

        On a busy machine the gateway may consider the worker silent and refuse; such requests are repeated.
        """
        while True:
            clients = self._asked_when_ready(questions)
            wait_until_taken(self._served.url, clients)
            if not any(client.status == REFUSED for client in clients):
                return clients
            self.outcome.refused += sum(client.status == REFUSED for client in clients)
            wait_for(clients, ANSWER_S_MAX)

    def _asked_when_ready(self, questions: Sequence[str]) -> list[Client]:
        self._served.wait_ready()
        return self._asked(questions)

    def _judge(
        self, what: str, questions: Sequence[str], clients: Sequence[Client], struck: Sequence[psutil.Process]
    ) -> None:
        self.outcome.strikes += 1
        _, alive = psutil.wait_procs(struck, timeout=GONE_S_MAX)
        left = [*alive, *self._served.strays()]
        self.outcome.wrong += [f"{what}: leaked {process}" for process in left]
        for question, client in zip(questions, clients, strict=True):
            self.outcome.answers += 1
            if why := unanswered(client):
                self.outcome.failed.append(f"{what}: {question[:20]}: {why}")
            elif client.texts != [self._right[question]]:
                self.outcome.wrong.append(f"{what}: {question[:20]}: {client.texts}")


def unanswered(client: Client) -> str | None:
    """Return why this client has no complete answer, or None."""
    if client.is_alive():
        return f"nothing ended within {ANSWER_S_MAX} s"
    if client.failure is not None:
        return f"the client gave up: {client.failure!r}"
    if client.status != 200 or not client.read.rstrip().endswith(b"[DONE]"):
        return f"status {client.status}, cut off: {client.read[-300:]!r}"
    return client.error


def besiege(siege: Siege, given: argparse.Namespace) -> None:
    """Make all strikes, alternating between the kinds, and print each."""
    kinds = [*itertools.product(given.phases, range(2), given.signals)]
    for number in range(given.strikes):
        for phase, rank, sent in kinds:
            siege.strike(phase, rank, sent)
            print(f"{time.strftime('%X')} {number + 1}: {sent.name} of rank {rank} in {phase}", flush=True)


def report(outcome: Outcome) -> None:
    print(
        f"{outcome.strikes} strikes, {outcome.answers} answers, {len(outcome.wrong)} wrong,"
        f" {len(outcome.failed)} failed, {outcome.refused} refused before a strike"
    )


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Make all strikes at a new set. The measurements are printed even if the run fails."""
    with served_set(folder) as served:
        siege = Siege(served, given.streams, given.seed, given.tokens)
        try:
            besiege(siege, given)
        except BaseException:
            print(served.process.log()[-LOG_TOLD:])
            raise
        finally:
            report(siege.outcome)
    return [*siege.outcome.wrong, *siege.outcome.failed]


if __name__ == "__main__":
    by_name = {number.name: number for number in SIGNALS}
    options = {
        "--strikes": {"type": int, "default": 25, "help": "number for each signal, rank and phase"},
        "--streams": 16,
        "--tokens": {"type": int, "default": ANSWER_TOKENS, "help": "length of each answer"},
        "--seed": 0,
        "--phases": {"nargs": "+", "choices": PHASES, "default": PHASES},
        "--signals": {"nargs": "+", "type": by_name.__getitem__, "default": SIGNALS, "metavar": "SIGNAL"},
    }
    run_program(__doc__, check, options)
