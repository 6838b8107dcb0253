"""Random kills of workers and spares under streams: `python -m tests.faults.spares --kills 1000`.

Every answer must equal that of an undisturbed run. There are never two spares or two workers at once. In the
end there is one of each, and the supervisor's resources are as after warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from tests.faults.failover import FLAGS, Asker, Outcome, asking, await_answers
from tests.faults.runner import run_program
from tests.faults.several import Scripted, Several, several
from tests.system import eventually

CLIENTS = 8
WARM_KILLS = 10
SETTLE_S_MAX = 60.0
STEADY_LOOKS = 30
LIFE_S_MAX = 1.5
SERVING_SHARE = 0.75
LOOK_S = 0.05
GROWTH_BYTES_MAX = 8 * 2**20
PROGRAM = "tests.scripted_worker"


class Counts(NamedTuple):
    """Of the supervisor."""

    descriptors: int
    threads: int

    def exceeds(self, other: Counts) -> bool:
        return self.descriptors > other.descriptors or self.threads > other.threads


@dataclass(slots=True)
class Kills(Outcome):
    """The results of a run. `most`: the maximum number of workers and spares at an instant. `bytes_held`: by
    the supervisor, after warm-up and at the end."""

    kills: Counter[str] = field(default_factory=Counter)
    most: int = 0
    bytes_held: list[int] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        warm, end = self.bytes_held
        grown = [f"the supervisor grew from {warm} to {end} bytes"] if end - warm > GROWTH_BYTES_MAX else []
        crowd = [f"{self.most} processes were workers or spares at once"] if self.most > 2 else []
        return self.wrong + grown + crowd


class Siege:
    """The kills, and a watch over the processes."""

    def __init__(self, served: Several, seed: int) -> None:
        self.outcome = Kills()
        self._served = served
        self._dice = random.Random(seed)
        self._over = threading.Event()
        self._warm: Counts | None = None

    def run(self, kills: int, warm: int = WARM_KILLS) -> Kills:
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            with asking(self._served.url, self._dice, CLIENTS, self.outcome) as askers:
                self._kill_all(askers, kills, warm)
        finally:
            self._over.set()
            watcher.join()
        self._settle(self._warm)
        return self.outcome

    def _kill_all(self, askers: list[Asker], kills: int, warm: int) -> None:
        for number in range(warm + kills):
            if number and number % 2 == 0:
                await_answers(askers)
            if number == warm:
                self._warm = self._settle()
            # Some are killed while they start, most when a worker is ready, so that clients get answers.
            if self._dice.random() < SERVING_SHARE:
                eventually(self._serving, within_s=SETTLE_S_MAX, what="a worker serves")
            time.sleep(self._dice.uniform(0, LIFE_S_MAX))
            self._kill()

    def _kill(self) -> None:
        """Kill one of the existing processes."""
        found = eventually(
            lambda: list(_processes(self._served)), within_s=SETTLE_S_MAX, what="there is a process to kill"
        )
        victim = self._dice.choice(found)
        kind = "worker" if victim.pid in self._serving() else "spare, or on its way"
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
        self.outcome.kills[kind] += 1

    def _serving(self) -> list[int]:
        try:
            return self._served.pids("fake")
        except httpx.HTTPError:
            return []

    def _watch(self) -> None:
        """Record the number of processes: there must never be more than one worker and one spare."""
        while not self._over.wait(LOOK_S):
            self.outcome.most = max(self.outcome.most, len(list(_processes(self._served))))

    def _settle(self, most: Counts | None = None) -> Counts:
        """Wait until only a worker and a spare are left and stay, and the supervisor's descriptors and
        threads, of which there are at most `most`, too: threads start later than their process. Return
        these counts and note its memory."""
        stats, ends_at = self._served.process.stats, time.monotonic() + SETTLE_S_MAX
        seen: object = None
        looks, counts = 0, Counts(0, 0)
        while looks < STEADY_LOOKS:
            assert time.monotonic() < ends_at, f"not settled: {seen}, at most {most}"
            time.sleep(LOOK_S)
            there = {process.pid for process in _processes(self._served)}
            serving = there & set(self._serving())
            counts = Counts(stats.num_fds(), stats.num_threads())
            is_settled = (len(there), len(serving)) == (2, 1) and not counts.exceeds(most or counts)
            looks = looks + 1 if is_settled and (there, serving, counts) == seen else 0
            seen = there, serving, counts
        self.outcome.bytes_held.append(stats.memory_info().rss)
        return counts


def _processes(served: Several) -> Iterator[psutil.Process]:
    """Yield all workers and spares; killed processes that are not reaped yet do not count."""
    for child in served.process.stats.children():
        try:
            if PROGRAM in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                yield child
        except psutil.Error:
            continue


def besiege(folder: Path, kills: int, seed: int, warm: int = WARM_KILLS) -> Kills:
    """Run the whole test."""
    with several(folder, Scripted("fake", " ".join(FLAGS["scripted"])), spare=True) as served:
        return Siege(served, seed).run(kills, warm)


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    """Run the whole test, and print what was killed and what the supervisor held."""
    outcome = besiege(folder, given.kills, given.seed)
    print(f"killed {dict(outcome.kills)}; {outcome.answers} answers; bytes {outcome.bytes_held}")
    return outcome.failures


if __name__ == "__main__":
    run_program(__doc__, check, {"--kills": 1000, "--seed": 0})
