"""Random kills of workers and spares under streams: `python -m tests.faults.spares --kills 1000`.

The system has a supervisor, a gateway, a scripted worker and a spare; the clients are those of
`tests.faults.failover`. Every answer must equal that of an undisturbed run. There are never two spares or two
workers at once. In the end there is one of each, and the supervisor's resources are as after warm-up.
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

import httpx
import psutil

from tests.faults.failover import FLAGS, Outcome, asking
from tests.faults.runner import run_program
from tests.faults.several import Scripted, Several, several
from tests.system import eventually

CLIENTS = 8
WARM_KILLS = 10
SETTLE_S_MAX = 60.0
LETTING_GO_S_MAX = 20.0
STEADY_LOOKS = 75
LIFE_S_MAX = 1.5
SERVING_SHARE = 0.75
LOOK_S = 0.02
GROWTH_BYTES_MAX = 8 * 2**20
PROGRAM = "tests.scripted_worker"


@dataclass(slots=True)
class Kills(Outcome):
    """The results of a run. `most`: the maximum number of workers and spares at an instant. `held`: the
    supervisor's bytes, descriptors and threads, after warm-up and at the end."""

    kills: Counter[str] = field(default_factory=Counter)
    most: int = 0
    held: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def grown(self) -> list[str]:
        (bytes_before, *before), (bytes_after, *after) = self.held
        more = any(now > then for now, then in zip(after, before, strict=True))
        grown = [f"{after} descriptors and threads, {before} before"] if more else []
        return grown + (["memory"] if bytes_after - bytes_before > GROWTH_BYTES_MAX else [])


class Siege:
    """The kills, and a watch over the processes."""

    def __init__(self, served: Several, seed: int) -> None:
        self.outcome = Kills()
        self._served = served
        self._dice = random.Random(seed)
        self._over = threading.Event()

    def run(self, kills: int, warm: int = WARM_KILLS) -> Kills:
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            with asking(self._served.url, self._dice, CLIENTS, self.outcome):
                self._kill_all(kills, warm)
        finally:
            self._over.set()
            watcher.join()
        self.outcome.held.append(self._settled(like=self.outcome.held[0]))
        return self.outcome

    def _kill_all(self, kills: int, warm: int) -> None:
        for number in range(warm + kills):
            if number == warm:
                self.outcome.held.append(self._settled())
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

    def _settled(self, like: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
        """Return the supervisor's resources once only a worker and a spare are left.

        `like`: wait for at most these descriptors and threads, and return any counts after a timeout.
        """
        held = eventually(
            self._held_of_two, within_s=SETTLE_S_MAX, what="only a worker and a spare are left for a while"
        )
        assert held is not None
        ends_at = time.monotonic() + LETTING_GO_S_MAX
        while any(map(int.__gt__, held[1:], (like or held)[1:])) and time.monotonic() < ends_at:
            time.sleep(LOOK_S)
            held = self._held()
        return held

    def _held_of_two(self) -> tuple[int, int, int] | None:
        """Return the resources if the worker and the spare stay: what was just killed is still there for an
        instant, and its successor may wait until the workers are idle."""
        there = self._there()
        held = self._steady() if self._is_settled() else None
        return held if self._there() == there else None

    def _steady(self) -> tuple[int, int, int]:
        """Return the resources once they are stable: threads start later than their process."""
        held, looks = self._held(), 0
        while looks < STEADY_LOOKS:
            time.sleep(LOOK_S)
            now = self._held()
            looks = looks + 1 if now[1:] == held[1:] else 0
            held = now
        return held

    def _held(self) -> tuple[int, int, int]:
        stats = self._served.process.stats
        return stats.memory_info().rss, stats.num_fds(), stats.num_threads()

    def _there(self) -> set[int]:
        return {process.pid for process in _processes(self._served)}

    def _is_settled(self) -> bool:
        there = self._there()
        return len(there) == 2 and len(there & set(self._serving())) == 1


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
    warm, end = outcome.held
    print(f"killed {dict(outcome.kills)}; {outcome.answers} answers")
    print(f"supervisor bytes, descriptors, threads: {warm} when warm, {end} at the end")
    crowd = f"at most {outcome.most} processes that were workers or could become one"
    print(crowd)
    return [*outcome.wrong, *outcome.grown, *([crowd] if outcome.most > 2 else [])]


if __name__ == "__main__":
    run_program(__doc__, check, {"--kills": 1000, "--seed": 0})
