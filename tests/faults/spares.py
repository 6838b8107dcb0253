"""Workers and spares that are killed at random, under streams: `python -m tests.faults.spares --kills 1000`.

A supervisor with a gateway, a scripted worker and a spare; the clients are those of `tests.faults.failover`.
Every answer must be that of an undisturbed run. At no instant are there two spares, or two workers; in the
end there is one of each, nothing else, and the supervisor holds what it held when it was warm.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.faults.failover import FLAGS, Asker
from tests.faults.several import Scripted, Several, several
from tests.system import eventually

CLIENTS = 8
WARM_KILLS = 10
SETTLE_S_MAX = 60.0
LETTING_GO_S_MAX = 5.0
STEADY_LOOKS = 20
LIFE_S_MAX = 1.5
SERVING_SHARE = 0.75
LOOK_S = 0.02
GROWTH_BYTES_MAX = 8 * 2**20
PROGRAM = "worker.fake"


@dataclass(slots=True)
class Outcome:
    """What became of it all. `most`: how many of these processes there were at one instant. `held`: of the
    supervisor, when warm and at the end: bytes, descriptors, threads."""

    kills: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    most: int = 0
    held: list[tuple[int, int, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def grown(self) -> list[str]:
        (bytes_before, *before), (bytes_after, *after) = self.held
        more = any(now > then for now, then in zip(after, before, strict=True))
        grown = [f"{after} descriptors and threads, {before} before"] if more else []
        return grown + (["memory"] if bytes_after - bytes_before > GROWTH_BYTES_MAX else [])


class Siege:
    """Who is killed, and who watches."""

    def __init__(self, served: Several, seed: int) -> None:
        self.outcome = Outcome()
        self._served = served
        self._dice = random.Random(seed)
        self._over = threading.Event()

    def run(self, kills: int, warm: int = WARM_KILLS) -> Outcome:
        watcher = threading.Thread(target=self._watch)
        askers = [
            Asker(self._served.url, random.Random(self._dice.random()), self._over) for _ in range(CLIENTS)
        ]
        for thread in (watcher, *askers):
            thread.start()
        try:
            for number in range(warm + kills):
                if number == warm:
                    self.outcome.held.append(self._settled())
                # Some are killed on their way; most when one serves, or nobody would ever be answered.
                if self._dice.random() < SERVING_SHARE:
                    eventually(self._serving, within_s=SETTLE_S_MAX, what="a worker serves")
                time.sleep(self._dice.uniform(0, LIFE_S_MAX))
                self._kill()
        finally:
            self._over.set()
            for thread in (watcher, *askers):
                thread.join()
        self.outcome.held.append(self._settled(like=self.outcome.held[0]))
        for asker in askers:
            self.outcome.answers += asker.outcome.answers
            self.outcome.wrong += asker.outcome.wrong
        return self.outcome

    def _kill(self) -> None:
        """One of those that there are."""
        found = eventually(
            lambda: list(_processes(self._served)), within_s=SETTLE_S_MAX, what="somebody to kill"
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
        """One worker and one spare: of a third one there must not be a trace."""
        while not self._over.wait(LOOK_S):
            self.outcome.most = max(self.outcome.most, len(list(_processes(self._served))))

    def _settled(self, like: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
        """What the supervisor holds once it is left alone with a worker and a spare. `like`: no more of
        descriptors and threads than that, or whatever it holds after a while."""
        eventually(self._is_settled, within_s=SETTLE_S_MAX, what="a worker and a spare, and nobody else")
        ends_at = time.monotonic() + LETTING_GO_S_MAX
        held = self._steady()
        while any(map(int.__gt__, held[1:], (like or held)[1:])) and time.monotonic() < ends_at:
            time.sleep(LOOK_S)
            held = self._held()
        return held

    def _steady(self) -> tuple[int, int, int]:
        """What it holds when that has not changed for a while: a process is there before its threads are."""
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

    def _is_settled(self) -> bool:
        there = {process.pid for process in _processes(self._served)}
        return len(there) == 2 and len(there & set(self._serving())) == 1


def _processes(served: Several) -> Iterator[psutil.Process]:
    """All that are workers, or may become some; those that were killed and are not reaped yet are none."""
    for child in served.process.stats.children():
        try:
            if PROGRAM in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                yield child
        except psutil.Error:
            continue


def besiege(folder: Path, kills: int, seed: int, warm: int = WARM_KILLS) -> Outcome:
    """All of it."""
    with several(folder, Scripted("fake", " ".join(FLAGS["scripted"])), spare=True) as served:
        return Siege(served, seed).run(kills, warm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = besiege(Path(folder), given.kills, given.seed)
    print(f"killed {dict(outcome.kills)}; {outcome.answers} answers, {len(outcome.wrong)} wrong")
    print(f"at most {outcome.most} processes that were workers or could become one")
    print(f"the supervisor's bytes, descriptors, threads: {outcome.held[0]} when warm, {outcome.held[1]} now")
    for wrong in (*outcome.wrong[:5], *outcome.grown):
        print(wrong)
    return 1 if outcome.wrong or outcome.grown or outcome.most > 2 else 0


if __name__ == "__main__":
    raise SystemExit(main())
