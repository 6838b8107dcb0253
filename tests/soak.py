"""Run all randomized tests for any length of time: `make soak [SEEDS=10000] [SECONDS=…] [LANES="…"]`.

The same seed reproduces a failure. With SECONDS, rounds with new seeds run until the time is over."""

from __future__ import annotations

import argparse
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SEEDS = 10_000
ROUND = SEEDS // 50
"""The size of a round if SECONDS is given."""
SEED_MAX = 2**31


@dataclass(frozen=True, slots=True)
class Lane:
    """A randomized test program.

    `full`: the count of a lane at `SEEDS` seeds. `command`: contains `{seed}`, `{count}` and their sum
    `{end}`. `least`: the smallest count that measures anything.
    """

    name: str
    full: int
    command: str
    least: int = 1

    def words(self, seed: int, seeds: int) -> list[str]:
        """Return the command line, with the count scaled by `seeds` / `SEEDS` to at least `least`."""
        count = max(self.least, self.full * seeds // SEEDS)
        told = self.command.format(seed=seed, count=count, end=seed + count)
        return [sys.executable, "-m", *told.split()]


LANES = (
    Lane("simulation", 10_000, "tests.broker.dispatch.test_dispatcher_simulated {seed} {end}"),
    Lane("schedules", 10_000, "tests.worker.core.test_scheduler_simulated {seed} {end}"),
    Lane("properties", 20, "tests.properties --seed {seed} --rounds {count}"),
    Lane("decoders", 1_000_000, "tests.protocol.fuzz --seed {seed} --frames {count}"),
    Lane("frames", 1_000_000, "tests.faults.frames --seed {seed} --frames {count}"),
    Lane("bodies", 100_000, "tests.faults.bodies --seed {seed} --count {count}"),
    Lane("leaks", 10_000, "tests.faults.leaks --seed {seed} --faults {count}"),
    Lane("overload", 60, "tests.faults.overload --seed {seed} --seconds {count}"),
    Lane("kills", 100, "tests.faults.failover --seed {seed} --kills {count}"),
    Lane("engine", 20, "tests.faults.failover --model embedded --seed {seed} --kills {count}"),
    Lane("gateways", 100, "tests.faults.gateway_ends --seed {seed} --kills {count} --reloads {count}"),
    Lane("spares", 1000, "tests.faults.spares --seed {seed} --kills {count}"),
    Lane("prompts", 70, "tests.faults.shared_prompts --seed {seed} --kills {count}"),
    Lane("recurrent", 70, "tests.faults.shared_prompts --model hybrid --seed {seed} --kills {count}"),
    Lane("smollm2", 60, "tests.faults.shared_prompts --model smollm2 --seed {seed} --kills {count}"),
    Lane("brief", 1, "tests.faults.shared_prompts --model smollm2 --brief --kills {count}"),
    Lane("ranks", 25, "tests.faults.ranks --seed {seed} --strikes {count}"),
    Lane("sets", 4, "tests.worker.ranks.lives --first-seed {seed} --seeds {count}"),
    Lane("attacks", 100, "tests.security.attacks --seed {seed} --count {count}", least=5),
    Lane("power", 300, "tests.faults.power_failures --seed {seed} --kills {count}", least=3),
    Lane("pressure", 1, "tests.faults.memory_pressure --runs {count}"),
    Lane("disk", 500, "tests.faults.disk_kills --seed {seed} --kills {count}"),
    Lane("rows", 50, "tests.worker.zoo --first-seed {seed} --seeds {count}"),
    Lane("sights", 50, "tests.worker.vision_models --first-seed {seed} --seeds {count}"),
    Lane("conversations", 50, "tests.worker.conversations --first-seed {seed} --seeds {count}"),
)


def run(lane: Lane, seed: int, seeds: int) -> bool:
    words = lane.words(seed, seeds)
    print(f"=== {lane.name}: python {' '.join(words[1:])}", flush=True)
    began = time.monotonic()
    status = subprocess.run(words, check=False).returncode
    print(f"=== {lane.name}: status {status} after {time.monotonic() - began:.0f} s", flush=True)
    return status == 0


def rounds(lanes: Sequence[Lane], seed: int, within_s: float) -> Iterator[tuple[Lane, int]]:
    """Yield all lanes with one seed, then with the next, until `within_s` is over; at least one lane."""
    over_at = time.monotonic() + within_s
    for first in itertools.count(seed, ROUND):
        for lane in lanes:
            yield lane, first % SEED_MAX
            if time.monotonic() >= over_at:
                return


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, help="first seed; default: random")
    names = [lane.name for lane in LANES]
    parser.add_argument("lanes", nargs="*", metavar="lane", help=f"one of {', '.join(names)}; default: all")
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
    print(f"failed: {'; '.join(failed)}" if failed else "all lanes passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
