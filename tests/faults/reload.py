"""Reloads under streams that never pause: `python -m tests.faults.reload --seconds 60 --reloads 10`.

The clients are those of `tests.faults.failover`. Every answer must equal that of an undisturbed run, and no
request may be refused. Workers alternately finish their requests and hand them over.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.failover import STEP_MS, Outcome, asking
from tests.faults.runner import run_program
from tests.faults.serving import Served, serving

CLIENTS = 16


@dataclass(slots=True)
class Reloads(Outcome):
    """The results of a run. `took_s`: of each reload. `resumed`: answers continued on another worker."""

    took_s: list[float] = field(default_factory=list)
    resumed: int = 0


def run(served: Served, seconds: float, reloads: int, seed: int, clients: int = CLIENTS) -> Reloads:
    """Make `reloads` reloads, evenly over `seconds`, under `clients` clients."""
    dice, outcome = random.Random(seed), Reloads()
    with asking(served.url, dice, clients, outcome):
        began = time.monotonic()
        for number in range(1, reloads + 1):
            _sleep_until(began + (number - 1 + dice.random()) * seconds / reloads)
            served.set_worker(flags(number))
            asked_at = time.monotonic()
            done, text = served.reload()
            outcome.took_s.append(time.monotonic() - asked_at)
            outcome.wrong += [] if done else [f"reload {number}: {text}"]
        _sleep_until(began + seconds)
    outcome.wrong += ["refused"] * outcome.refusals
    outcome.resumed = served.status()["gateway"]["failover"].get("resumed", 0)
    return outcome


def _sleep_until(due: float) -> None:
    time.sleep(max(0.0, due - time.monotonic()))


def flags(number: int) -> str:
    """Return the flags of the worker with this number."""
    return f"--images --step-ms {STEP_MS} --drain-timeout {0 if number % 2 else 10}"


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run the reloads under a new server, and print their times."""
    with serving(folder, flags(0)) as served:
        outcome = run(served, given.seconds, given.reloads, given.seed, given.clients)
    slowest_s = max(outcome.took_s, default=0.0)
    print(f"{len(outcome.took_s)} reloads, the slowest {slowest_s:.2f} s; {outcome.answers} answers")
    print(f"{outcome.resumed} continued on another worker, longest pause {outcome.pause_s_max:.2f} s")
    return outcome.wrong


if __name__ == "__main__":
    options = {"--seconds": 60.0, "--reloads": 10, "--seed": 0, "--clients": CLIENTS}
    run_program(__doc__, check, options)
