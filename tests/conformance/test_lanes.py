"""`make conformance`: its lanes, their drivers, and when they have passed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from tests.conformance.__main__ import SMOKES
from tests.conformance.drivers import DRIVERS, drivers_in
from tests.conformance.outcomes import Count, Outcome, count_of
from tests.conformance.programs import run
from tests.conformance.servers import HOUSES
from tests.system import eventually


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ("OK a\nOK b\n2/2\n", Count(2, 2)),
        ("FAIL a 1/3\n  0/12 \n\n", Count(0, 12)),
        ("2/2\nTraceback\n", None),  # it failed after the count
        ("", None),
    ],
)
def test_only_the_last_line_counts(said: str, count: Count | None) -> None:
    assert count_of(said) == count


@pytest.mark.parametrize(
    ("status", "count", "must_count", "passed"),
    [
        (0, Count(3, 3), True, True),
        (0, Count(2, 3), True, False),
        (0, Count(0, 0), True, False),  # it has checked nothing
        (-9, Count(3, 3), True, False),
        (0, None, False, True),
    ],
)
def test_all_of_something_and_status_0_have_passed(
    status: int | None, count: Count | None, must_count: bool, passed: bool
) -> None:
    assert Outcome("sdks", "a", status, count, must_count=must_count).passed is passed


def run_code(code: str, folder: Path, within_s: float = 60.0) -> Outcome:
    return run("sdks", "a", [sys.executable, "-uc", code], os.environ, folder, within_s)


def test_a_program_is_counted_and_its_children_end_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper = "subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    code = f"import subprocess, sys; open('pid', 'w').write(str({sleeper}.pid))\n"
    outcome = run_code(code + "print('well', file=sys.stderr); print('1/2'); sys.exit(3)", tmp_path)
    assert (outcome.status, outcome.count) == (3, Count(1, 2))
    assert capsys.readouterr().out == "well\n1/2\n"
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not psutil.pid_exists(pid) or _is_zombie(pid), within_s=10, what="it has ended")


def _is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_all_smokes_are_driven_and_each_environment_and_lane_has_one() -> None:
    drivers, others = drivers_in(SMOKES)
    assert not others
    assert {driver.environment.name for driver in drivers} == {made.name for made in DRIVERS.values()}
    for house in HOUSES.values():
        assert any(house.concerns(driver) for driver in drivers)
