"""Permanent loss of a rank under streams: `python -m tests.faults.fallbacks --falls 5 --after 15`.

`roundhouse serve` runs a tiny model over two ranks on loopback, with the same model in one process as its
fallback. A rank is killed and cannot be restarted. Every stream must continue on the fallback with the text
of an undisturbed run, and report that (`continued_by`). Its pause is printed next to `--fallback-after`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from deploy.load.samples import percentile
from tests.faults.ranks import ANSWER, ANSWER_S_MAX, unanswered
from tests.faults.runner import run_program
from tests.faults.sets import MODEL, Set, served_set
from tests.faults.streams import Client, ask, wait_for, wait_until_flowing
from tests.system import NO_TLS, eventually

PLAN = f"{MODEL}, one process alone"
AFTER_S = 15.0
FALL_S_MAX = 120.0
PYTHON = f"""#!/bin/bash
exec {sys.executable} "$@"
"""


@dataclass(slots=True)
class Outcome:
    """`served_s`: from a kill until the fallback was ready. `pauses_s`: the longest of each stream."""

    streams: int = 0
    served_s: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def interpreter(folder: Path) -> Path:
    """Return the interpreter of all ranks but the first; deleting it simulates a machine that stays away."""
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return python


def fall(folder: Path, streams: int, after_s: float, tokens: int, outcome: Outcome) -> None:
    """Test one fallback with a new server, because a server does not return to its first plan."""
    python = interpreter(folder)
    answer = ANSWER | {"max_tokens": tokens}
    questions = [f"Count from {first} to 200." for first in range(streams)]
    with served_set(folder, f"--fallback-after={after_s:g}", python=str(python), falls=True) as served:
        before = [ask(served.url, question, **answer) for question in questions]
        wait_for(before, ANSWER_S_MAX)
        clients = [ask(served.url, question, **answer) for question in questions]
        wait_until_flowing(clients)
        underway = [client for client in clients if not client.ended_at]
        python.unlink()
        first, second = served.whole()
        began = time.monotonic()
        second.kill()
        eventually(lambda: served.serves_after(first.pid), within_s=after_s + FALL_S_MAX, what="served")
        outcome.served_s.append(time.monotonic() - began)
        for client in clients:
            client.join(max(0.0, began + ANSWER_S_MAX - time.monotonic()))
        outcome.streams += len(underway)
        outcome.pauses_s += [client.pause_s for client in underway]
        _judge(served, before, clients, underway, outcome)


def _judge(
    served: Set,
    before: Sequence[Client],
    clients: Sequence[Client],
    underway: Sequence[Client],
    outcome: Outcome,
) -> None:
    for right, client in zip(before, clients, strict=True):
        if why := unanswered(client):
            outcome.wrong.append(why)
        elif client.texts != right.texts:
            outcome.wrong.append(f"{client.texts} instead of {right.texts}")
        elif client in underway and told_of(client) != [PLAN]:
            outcome.wrong.append(f"continued by {told_of(client)}")
    status = httpx.get(f"{served.url}/v1/status", timeout=30, verify=NO_TLS).json()
    if status["gateway"]["continued_by"] != {PLAN: len(underway)}:
        outcome.wrong.append(f"status has {status['gateway']['continued_by']} of {len(underway)}")


def told_of(client: Client) -> list[str]:
    """Return the plans that the answer names in `continued_by`."""
    return [document["continued_by"] for document in client.documents if "continued_by" in document]


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Test the fallbacks one after the other, and print their times."""
    outcome = Outcome()
    for number in range(1, given.falls + 1):
        (folder / str(number)).mkdir()
        fall(folder / str(number), given.streams, given.after, given.tokens, outcome)
        print(
            f"{time.strftime('%X')} {number}: the fallback was ready after {outcome.served_s[-1]:.1f} s,"
            f" {outcome.streams} streams so far, {len(outcome.wrong)} wrong",
            flush=True,
        )
    for what, seconds in (("served", outcome.served_s), ("pause of a stream", outcome.pauses_s)):
        quantiles = " ".join(f"{percentile(seconds, each):.1f}" for each in (50, 90, 100))
        print(f"{what}, seconds (p50 p90 max): {quantiles}; --fallback-after={given.after:g}")
    return outcome.wrong


if __name__ == "__main__":
    after = {"type": float, "default": AFTER_S, "help": "--fallback-after"}
    run_program(__doc__, check, {"--falls": 5, "--streams": 16, "--after": after, "--tokens": 300})
