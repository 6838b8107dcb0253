"""A tenth of the tests with two busy processes beside them: `make busy`, `make busy TENTH=3`.

Which tenth runs follows from the last commit, so that a failure can be repeated."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
TENTHS = 10
BUSY = 2
"""Number of busy processes, each of which takes a core."""
_BUSY_LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def files_of(tenth: int) -> list[str]:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if zlib.crc32(file.encode()) % TENTHS == tenth]


def tenth_of_commit() -> int:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(head.stdout, 16) % TENTHS


@contextlib.contextmanager
def busy(count: int = BUSY) -> Iterator[None]:
    """Keep `count` cores busy until exit, or until this process ends."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenth", type=int, choices=range(TENTHS))
    given = parser.parse_args(arguments)
    tenth = tenth_of_commit() if given.tenth is None else given.tenth
    print(f"tenth {tenth} of the tests, beside {BUSY} busy processes", flush=True)
    with busy():
        return subprocess.call([sys.executable, "-m", "pytest", "-n", "auto", *files_of(tenth)], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
