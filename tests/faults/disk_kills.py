"""A process that stores prefixes on disk is killed at random instants, over and over, in one folder.

Whatever the instant: the next tier opens, what it finds is what was written, what was reported written and
not removed since is there, and nothing unfinished stays. `python -m tests.faults.disk_kills` is the long run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from worker.pictures import Blob
from worker.prefixes.disk import DiskTier
from worker.prefixes.files import Record

FINGERPRINT = "f1" * 16
STORED_MAX = 40
START_S_MAX = 60.0
RUN_S_MAX = 0.05
"""A process is killed that long after a first report, at most."""


def record_of(digest: str) -> Record:
    """What is stored under a digest: anybody can tell."""
    chance = random.Random(digest)
    blobs = {}
    for name in range(chance.randrange(1, 5)):
        nbytes = chance.choice((0, 10, 5_000, 300_000, 2_000_000))
        # A repeated pattern is quickly made; its length is such that nothing in the wrong place looks right.
        pattern = chance.randbytes(4999)
        blobs[f"{name}"] = Blob("U8", (nbytes,), (pattern * (nbytes // len(pattern) + 1))[:nbytes])
    return Record(digest, {"keys": [chance.randrange(2**40) for _ in range(200)]}, blobs)


def equal(one: Record, other: Record) -> bool:
    return one.about == other.about and {n: bytes(b.data) for n, b in one.blobs.items()} == {
        n: bytes(b.data) for n, b in other.blobs.items()
    }


# --- the process that is killed ---


def store_forever(folder: Path, name: str) -> None:
    """Say what is written, and what is about to be removed."""
    tier = DiskTier(folder, FINGERPRINT)
    stored = [found.digest for found in tier.scan()]

    def on_written(digest: str, file_bytes: int | None) -> None:
        if file_bytes:
            _say(f"written {digest}")
            stored.append(digest)

    for number in itertools.count():
        tier.write(record_of(hashlib.sha256(f"{name} {number}".encode()).hexdigest()), on_written)
        if number % 4 == 3:
            tier.flush()
        while len(stored) > STORED_MAX:
            _say(f"removing {stored[0]}")
            tier.remove([stored.pop(0)])


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # whole, though two threads do: `print` may mix them


# --- who kills it ---


class Killer:
    """Starts, kills and checks, in one folder. `outcomes` counts what the kills met."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._folder, self._seed = folder, seed
        self._chance = random.Random(seed)
        self._expected: set[str] = set()

    def kill_one(self, number: int) -> None:
        """Raises `AssertionError` when a promise is broken."""
        for line in self._run(f"{self._seed} {number}"):
            word, digest = line.split()
            if word == "written":
                self._expected.add(digest)
            else:
                self._expected.discard(digest)
        self.outcomes["kills"] += 1
        self.outcomes["in a write"] += any(path.suffix == ".part" for path in self._folder.iterdir())
        self._check()

    def _run(self, name: str) -> list[str]:
        """The whole lines that a process printed until it was killed."""
        command = [
            sys.executable,
            "-m",
            "tests.faults.disk_kills",
            "--store",
            str(self._folder),
            "--name",
            name,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                # Now and then while it starts, which is when it looks at what the last one left.
                printed = process.stdout.readline() if self._chance.random() < 0.9 else ""
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self._chance.uniform(0, RUN_S_MAX if printed else 10 * RUN_S_MAX))
                    raise AssertionError(f"the process ended by itself: {process.returncode}")
            finally:
                process.kill()
            printed += process.stdout.read()
        return [line for line in printed.splitlines(keepends=True) if line.endswith("\n")]

    def _check(self) -> None:
        tier = DiskTier(self._folder, FINGERPRINT)
        try:
            found = {item.digest: item for item in tier.scan()}
            answers: list[dict[str, Record | None]] = []
            tier.read(found, answers.append)
            assert tier.flush(START_S_MAX)
        finally:
            tier.close(wait=True)
        assert self._expected <= found.keys(), f"lost: {self._expected - found.keys()}"
        for digest, read in answers[0].items():
            assert read is not None, f"{digest} was found and could not be read"
            expected = record_of(digest)
            assert equal(read, expected), f"{digest} is not what was written"
            assert found[digest].about == expected.about
        self.outcomes["read"] += len(found)
        names = {path.name for path in self._folder.iterdir()}
        assert names == {f"{digest}.prefix.safetensors" for digest in found}
        assert tier.usage == sum(path.stat().st_size for path in self._folder.iterdir())


def run(folder: Path, kills: int, seed: int, within_s: float = float("inf")) -> Counter[str]:
    """So many kills, or as many as there is time for."""
    killer, deadline = Killer(folder, seed), time.monotonic() + within_s
    for number in range(kills):
        if time.monotonic() < deadline:
            killer.kill_one(number)
    return killer.outcomes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.disk_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.store is not None:
        store_forever(asked.store, asked.name)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(Path(folder), asked.kills, asked.seed)
    print(f"{time.monotonic() - started:.1f} s:", ", ".join(f"{name} {n}" for name, n in outcomes.items()))


if __name__ == "__main__":
    main()
