"""Power failures: a short run of `python -m tests.faults.power_failures`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.faults.power_failures import VICTIMS, check


def test_nothing_that_was_answered_is_lost_or_repeated_when_one_or_all_processes_die(tmp_path: Path) -> None:
    given = argparse.Namespace(kills=len(VICTIMS), responses=4, lines=8, frozen=1.0)
    given.interval, given.seed, given.victims = 1.0, 1, ",".join(VICTIMS)
    assert check(tmp_path, given) == []
