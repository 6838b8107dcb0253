"""Heap of the garbage collector after a start: a full collection no longer scans what that has left."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
import httpx
from protocol.common import gc_heap

before = len(gc.get_objects())
gc_heap.freeze()
print(before, len(gc.get_objects()), gc.get_freeze_count())
"""


def test_objects_of_the_start_are_not_scanned_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    before, after, frozen = map(int, done.stdout.split())
    assert frozen > 10_000
    assert after < 0.1 * before
