"""The start of a worker process: one that hangs before it serves ends by itself."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import time
from worker import __main__ as worker

def hang(*args, **options):
    time.sleep(600)

worker.START_S_MAX = 1.0
worker.settings.read_or_exit = hang
worker.main()
"""


def test_a_start_that_hangs_ends_and_tells_where() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in hang" in done.stderr
