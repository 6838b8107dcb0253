"""Sets that lose a rank for good, under streams: `python -m tests.faults.falls --falls 5 --after 15`.

`roundhouse serve` with a tiny model over two ranks on loopback, and the same model alone as its second plan.
A rank is killed and cannot be started again. Every stream must go on by the second plan, with the words of
an undisturbed run, and say so (`continued_by`); the pause of each is told beside `--fallback-after`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from deploy.load.samples import percentile
from tests.faults.ranks import ANSWER, ANSWER_S_MAX, unanswered
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
    """`served_s`: from each kill until the second plan served; `pauses_s`: the longest of each stream."""

    streams: int = 0
    served_s: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def interpreter(folder: Path) -> Path:
    """Of all ranks but the first: a machine that does not come back is one whose interpreter has gone."""
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return python


def fall(folder: Path, streams: int, after_s: float, tokens: int, outcome: Outcome) -> None:
    """Once, with a server of its own: the first plan comes back with a new one only."""
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
            outcome.wrong.append(f"{client.texts} in place of {right.texts}")
        elif client in underway and told_of(client) != [PLAN]:
            outcome.wrong.append(f"went on by {told_of(client)}")
    status = httpx.get(f"{served.url}/v1/status", timeout=30, verify=NO_TLS).json()
    if status["gateway"]["continued_by"] != {PLAN: len(underway)}:
        outcome.wrong.append(f"status has {status['gateway']['continued_by']} of {len(underway)}")


def told_of(client: Client) -> list[str]:
    """The plans that its answer was continued by, as it says."""
    return [document["continued_by"] for document in client.documents if "continued_by" in document]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--falls", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--after", type=float, default=AFTER_S, help="--fallback-after")
    parser.add_argument("--tokens", type=int, default=300)
    given = parser.parse_args()
    outcome = Outcome()
    for number in range(given.falls):
        with tempfile.TemporaryDirectory() as folder:
            fall(Path(folder), given.streams, given.after, given.tokens, outcome)
        print(
            f"{time.strftime('%X')} {number + 1}: the second plan served after {outcome.served_s[-1]:.1f} s,"
            f" {outcome.streams} streams so far, {len(outcome.wrong)} wrong",
            flush=True,
        )
    for what, seconds in (("served", outcome.served_s), ("pause of a stream", outcome.pauses_s)):
        quantiles = " ".join(f"{percentile(seconds, each):.1f}" for each in (50, 90, 100))
        print(f"{what}, seconds (p50 p90 max): {quantiles}; --fallback-after={given.after:g}")
    for wrong in outcome.wrong[:10]:
        print(wrong)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
