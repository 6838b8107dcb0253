"""Processes of a measurement end with it, and those that must restart do."""

from __future__ import annotations

from pathlib import Path

import psutil

from bench.processes import running, tree, tree_cpu_s, wait_until
from bench.rivals import Command
from bench.versus.deaths import Loop

PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(60)
"""
BRIEF = """
import pathlib, sys
with pathlib.Path(sys.argv[1]).open("a") as file:
    file.write("lived\\n")
"""


def module(folder: Path, text: str) -> dict[str, str]:
    """Return an environment in which the module `made` has this text."""
    (folder / "made.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    with running("made", [], module(tmp_path, PARENT), silent=True) as process:
        wait_until(lambda: len(tree(process)) == 2, "no child")
        parent, child = tree(process)
        assert parent.pid == process.pid
        wait_until(lambda: tree_cpu_s(process) > 0, "no CPU time")  # it is counted in hundredths of a second
    wait_until(lambda: not psutil.pid_exists(child.pid) or child.status() == psutil.STATUS_ZOMBIE, "it lives")


def test_loop_restarts_process_until_closed(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    command = Command("made", [str(lives)], module(tmp_path, BRIEF), {})
    before = set(psutil.Process().children())  # of other tests in this process
    with Loop(command, tmp_path / "log"):
        wait_until(lambda: lives.exists() and lives.read_text().count("lived") >= 2, "it did not come back")
    lived = lives.read_text()
    left = set(psutil.Process().children()) - before
    assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]
    assert lives.read_text() == lived
