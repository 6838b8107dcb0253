"""Run all property tests with random examples: `python -m tests.properties [--seed N] [--rounds N]`.

`make test` runs them with the same examples each time. Each round has a seed of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def property_tests() -> list[str]:
    """Return the files of tests that use Hypothesis."""
    files = sorted(TESTS.rglob("test_*.py"))
    return [str(path) for path in files if "from hypothesis" in path.read_text(encoding="utf-8")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.properties", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    failed = []
    for seed in range(asked.seed, asked.seed + asked.rounds):
        options = ["--hypothesis-profile", "search", "--hypothesis-seed", str(seed)]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", *options, *property_tests()]
        if subprocess.run(command, check=False).returncode:
            failed.append(seed)
    print(f"failed with the seeds {failed}" if failed else f"{asked.rounds} rounds passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
