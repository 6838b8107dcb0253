"""Kill processes that write a disk tier of the prefix cache, at random instants, in one folder.

After each kill the next disk tier must open. Every record found must equal the written one, every record that
was reported as written and not removed must exist, and no partial file may remain.
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
from collections import Counter
from pathlib import Path

from tests.faults.runner import run_program
from worker.core.prefix.disk import DiskTier
from worker.core.prefix.folder import Record, WriteLedger
from worker.values import ArrayBytes

FINGERPRINT = "f1" * 16
STORED_MAX = 40
START_S_MAX = 60.0
RUN_S_MAX = 0.05
"""Maximum time from the first report of a process until it is killed."""


def record_of(digest: str) -> Record:
    """Return the record of a digest, a function of the digest alone."""
    chance = random.Random(digest)
    blobs = {}
    for name in range(chance.randrange(1, 5)):
        nbytes = chance.choice((0, 10, 5_000, 300_000, 2_000_000))
        # A repeated pattern is fast to make. Its odd length ensures that misplaced data differs.
        pattern = chance.randbytes(4999)
        blobs[f"{name}"] = ArrayBytes("U8", (nbytes,), (pattern * (nbytes // len(pattern) + 1))[:nbytes])
    return Record(digest, {"keys": [chance.randrange(2**40) for _ in range(200)]}, blobs)


def equal(one: Record, other: Record) -> bool:
    return one.about == other.about and {n: bytes(b.data) for n, b in one.blobs.items()} == {
        n: bytes(b.data) for n, b in other.blobs.items()
    }


# --- the process that is killed ---

STORE = "import sys; from tests.faults import disk_kills; disk_kills.store_forever(*sys.argv[1:])"


def store_forever(folder: str, name: str) -> None:
    """Store records, and print each one that was written or is about to be removed."""
    tier = _open(Path(folder))
    stored = [found.digest for found in tier.scan()]

    def on_written(digest: str, file_bytes: int | None) -> None:
        if file_bytes:
            _send(f"written {digest}")
            stored.append(digest)

    for number in itertools.count():
        tier.write(record_of(hashlib.sha256(f"{name} {number}".encode()).hexdigest()), on_written)
        if number % 4 == 3:
            tier.flush()
        while len(stored) > STORED_MAX:
            _send(f"removing {stored[0]}")
            tier.remove([stored.pop(0)])


def _open(folder: Path) -> DiskTier:
    return DiskTier(folder, FINGERPRINT, WriteLedger(folder.with_suffix(".writes"), 2**50))


def _send(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # one atomic write: `print` may interleave lines of two threads


# --- the killer ---


class Killer:
    """Starts and kills processes and checks the folder. `outcomes` counts what the kills interrupted."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._folder, self._seed = folder, seed
        self._chance = random.Random(seed)
        self._expected: set[str] = set()

    def kill_one(self, number: int) -> None:
        """Start and kill one process, then check. Raises `AssertionError` if a check fails."""
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
        """Return the complete lines that a process printed until it was killed."""
        command = [sys.executable, "-c", STORE, str(self._folder), name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                # Sometimes kill during start-up, while it scans the files of the previous process.
                printed = process.stdout.readline() if self._chance.random() < 0.9 else ""
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self._chance.uniform(0, RUN_S_MAX if printed else 10 * RUN_S_MAX))
                    raise AssertionError(f"the process exited by itself: {process.returncode}")
            finally:
                process.kill()
            printed += process.stdout.read()
        return [line for line in printed.splitlines(keepends=True) if line.endswith("\n")]

    def _check(self) -> None:
        tier = _open(self._folder)
        try:
            found = {item.digest: item for item in tier.scan()}
            answers: list[dict[str, Record | None]] = []
            tier.read(found, answers.append)
            assert tier.flush(START_S_MAX)
        finally:
            tier.close(wait=True)
        assert self._expected <= found.keys(), f"lost: {self._expected - found.keys()}"
        for digest, read in answers[0].items():
            assert read is not None, f"{digest} exists but cannot be read"
            expected = record_of(digest)
            assert equal(read, expected), f"{digest} is not what was written"
            assert found[digest].about == expected.about
        self.outcomes["read"] += len(found)
        names = {path.name for path in self._folder.iterdir()}
        assert names == {f"{digest}.prefix.safetensors" for digest in found}
        assert tier.usage == sum(path.stat().st_size for path in self._folder.iterdir())


def run(folder: Path, kills: int, seed: int) -> Counter[str]:
    """Make all kills in the folder. Raises `AssertionError` if a check fails."""
    killer = Killer(folder, seed)
    for number in range(kills):
        killer.kill_one(number)
    return killer.outcomes


def check(folder: Path, given: argparse.Namespace) -> list[str]:
    outcomes = run(folder, given.kills, given.seed)
    print(", ".join(f"{name} {n}" for name, n in outcomes.items()))
    return []


if __name__ == "__main__":
    run_program(__doc__, check, {"--kills": 200, "--seed": 0})
