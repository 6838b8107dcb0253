"""`make bench`: all its programs start, and the first one works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import check_arguments

ROOT = Path(__file__).resolve().parents[2]
INTERNAL = {"bench.bare"}
"""Programs that other programs start."""
RUN_S_MAX = 100


def programs() -> list[str]:
    """Return the modules and packages of `bench` that are programs."""
    bench = ROOT / "bench"
    names = {path.stem for path in bench.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    names |= {path.parent.name for path in bench.glob("*/__main__.py")}
    return sorted({f"bench.{name}" for name in names} - INTERNAL)


def test_the_table_of_commands_is_complete() -> None:
    table = (ROOT / "bench" / "README.md").read_text().partition("\n\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted(name.removeprefix("bench.") for name in programs())
    assert "BENCH ?= gateway\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("program", programs())
def test_a_bench_starts_and_reads_its_command_line(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_arguments(program, [], monkeypatch)


def test_the_default_bench_measures_the_gateway() -> None:
    command = [sys.executable, "-m", "bench.gateway", "--streams", "1", "--events", "100", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S_MAX, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +gateway / bare", done.stdout, re.MULTILINE)
