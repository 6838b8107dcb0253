"""Everything that takes chances, for as long as one likes: `make soak [SEEDS=10000] [SECONDS=…] [LANES="…"]`.

Each lane is a command of its own that takes a seed and a number. What it prints before it starts is how to
run it again, and a seed that fails fails again. Without SECONDS each lane runs once, at the size that a
release must stand or at a part of it (SEEDS). With SECONDS small rounds are run, each with new seeds, until
that time is over. The status is 1 if a lane failed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

SEEDS = 10_000
ROUND = SEEDS // 50
"""The size of a round where time is what is given."""
SEED_MAX = 2**31


@dataclass(frozen=True, slots=True)
class Lane:
    """`full`: how many of its things a lane does where there are `SEEDS` seeds. `command`: `{seed}` is where
    it begins, `{count}` how many, `{end}` their sum."""

    name: str
    full: int
    command: str

    def words(self, seed: int, seeds: int) -> list[str]:
        """Its command line for a share of `seeds` in `SEEDS`, at least one thing."""
        count = max(1, self.full * seeds // SEEDS)
        told = self.command.format(seed=seed, count=count, end=seed + count)
        return [sys.executable, "-m", *told.split()]


LANES = (
    Lane("simulation", 10_000, "tests.broker.dispatch.test_dispatcher_simulated {seed} {end}"),
    Lane("schedules", 10_000, "tests.worker.schedule.test_scheduler_simulated {seed} {end}"),
    Lane("decoders", 1_000_000, "tests.protocol.fuzz --seed {seed} --frames {count}"),
    Lane("frames", 1_000_000, "tests.faults.frames --seed {seed} --frames {count}"),
    Lane("bodies", 100_000, "tests.faults.bodies --seed {seed} --count {count}"),
    Lane("leaks", 10_000, "tests.faults.leaks --seed {seed} --faults {count}"),
    Lane("clients", 1000, "tests.faults.clients --seed {seed} --leaving {count}"),
    Lane("overload", 60, "tests.faults.overload --seed {seed} --seconds {count}"),
    Lane("kills", 100, "tests.faults.failover --seed {seed} --kills {count}"),
    Lane("engine", 20, "tests.faults.failover --model embedded --seed {seed} --kills {count}"),
    Lane("drafts", 10, "tests.faults.failover --model embedded --drafts --seed {seed} --kills {count}"),
    Lane("reloads", 50, "tests.faults.reload --seed {seed} --reloads {count} --seconds {count}"),
    Lane("spares", 1000, "tests.faults.spares --seed {seed} --kills {count}"),
    Lane("ranks", 25, "tests.faults.ranks --seed {seed} --strikes {count}"),
    Lane("falls", 5, "tests.faults.falls --falls {count}"),
    Lane("sets", 4, "tests.worker.ranks.lives --first-seed {seed} --seeds {count}"),
    Lane("disk", 500, "tests.faults.disk_kills --seed {seed} --kills {count}"),
    Lane("rows", 50, "tests.worker.zoo --first-seed {seed} --seeds {count}"),
    Lane("sights", 50, "tests.worker.sights --first-seed {seed} --seeds {count}"),
    Lane("conversations", 50, "tests.worker.conversations --first-seed {seed} --seeds {count}"),
)


def run(lane: Lane, seed: int, seeds: int) -> bool:
    """Whether the lane came through."""
    words = lane.words(seed, seeds)
    print(f"=== {lane.name}: python {' '.join(words[1:])}", flush=True)
    began = time.monotonic()
    status = subprocess.run(words, check=False).returncode
    print(f"=== {lane.name}: status {status} after {time.monotonic() - began:.0f} s", flush=True)
    return status == 0


def rounds(
    lanes: Sequence[Lane], seed: int, within_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[Lane, int]]:
    """All lanes with one seed, then with the next, while there is time; at least one of them."""
    over_at = clock() + within_s
    for first in itertools.count(seed, ROUND):
        for lane in lanes:
            yield lane, first % SEED_MAX
            if clock() >= over_at:
                return


def main(argv: Sequence[str] | None = None) -> int:
    """The status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, help="the first one; default: drawn now")
    names = [lane.name for lane in LANES]
    parser.add_argument("lanes", nargs="*", metavar="lane", help=f"of {', '.join(names)}; default: all")
    asked = parser.parse_args(argv)
    if strangers := set(asked.lanes) - set(names):
        parser.error(f"no such lane: {', '.join(sorted(strangers))}")
    seed = random.SystemRandom().randrange(SEED_MAX) if asked.seed is None else asked.seed
    lanes = [lane for lane in LANES if not asked.lanes or lane.name in asked.lanes]
    if asked.seconds is None:
        planned, size = iter([(lane, seed) for lane in lanes]), asked.seeds
    else:
        planned, size = rounds(lanes, seed, asked.seconds), ROUND
    failed = [f"{lane.name}, seed {first}" for lane, first in planned if not run(lane, first, size)]
    print(f"failed: {'; '.join(failed)}" if failed else "all came through")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
