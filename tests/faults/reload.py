"""Reloads under streams that never pause: `python -m tests.faults.reload --seconds 60 --reloads 10`.

The clients are those of `tests.faults.failover`. Every answer must be that of an undisturbed run, and nobody
may be refused. By turns workers end their requests and hand them over.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.failover import STEP_MS, Asker
from tests.faults.serving import Served, serving

CLIENTS = 16


@dataclass(slots=True)
class Outcome:
    """What became of it all. `wrong`: the first words of what went wrong, refusals too."""

    took_s: list[float] = field(default_factory=list)
    answers: int = 0
    resumed: int = 0
    pause_s_max: float = 0.0
    wrong: list[str] = field(default_factory=list)


def run(served: Served, seconds: float, reloads: int, seed: int, clients: int = CLIENTS) -> Outcome:
    """So many reloads, evenly over so many seconds, under so many clients."""
    dice, over, outcome = random.Random(seed), threading.Event(), Outcome()
    askers = [Asker(served.url, random.Random(dice.random()), over) for _ in range(clients)]
    for asker in askers:
        asker.start()
    began = time.monotonic()
    for number in range(reloads):
        over.wait(began + (number + dice.random()) * seconds / reloads - time.monotonic())
        served.set_worker(flags(number + 1))
        asked_at = time.monotonic()
        done, text = served.reload()
        outcome.took_s.append(time.monotonic() - asked_at)
        if not done:
            outcome.wrong.append(f"reload {number + 1}: {text}")
    over.wait(began + seconds - time.monotonic())
    over.set()
    for asker in askers:
        asker.join()
        one = asker.outcome
        outcome.answers += one.answers
        outcome.pause_s_max = max(outcome.pause_s_max, one.pause_s_max)
        outcome.wrong += one.wrong + ["refused"] * one.refusals
    outcome.resumed = served.status()["gateway"]["failover"].get("resumed", 0)
    return outcome


def flags(number: int) -> str:
    """What the worker with this number is told."""
    return f"--step-ms {STEP_MS} --drain-timeout {0 if number % 2 else 10}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--reloads", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), flags(0)) as served:
        outcome = run(served, given.seconds, given.reloads, given.seed, given.clients)
    slowest_s = max(outcome.took_s, default=0.0)
    print(f"{len(outcome.took_s)} reloads, the slowest {slowest_s:.2f} s; {outcome.answers} answers")
    print(f"{outcome.resumed} went on with another worker, longest pause {outcome.pause_s_max:.2f} s")
    print(f"{len(outcome.wrong)} failed, wrong or refused")
    for wrong in outcome.wrong[:5]:
        print(wrong)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
