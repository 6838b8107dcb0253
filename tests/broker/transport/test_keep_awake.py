"""Sleep inhibition: its policy, and the inhibitor with stand-ins for the system's programs."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.transport.keep_awake import HOLD_S, KeepAwake, SleepInhibitor, program
from tests.system import eventually

WAIT_S = 20.0
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with stand-ins for all programs, as the only entry of PATH."""
    for name in ("caffeinate", "systemd-inhibit", "tail"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_it_ends_with_the_process_that_wants_it(programs: Path) -> None:
    mac, linux = program("darwin", 77), program("linux", 77)
    assert mac == [str(programs / "caffeinate"), "-i", "-w", "77"]
    assert linux is not None
    assert linux[0] == str(programs / "systemd-inhibit")
    assert "--pid=77" in linux
    for name in ("tail", "caffeinate"):
        (programs / name).unlink()
    assert (program("darwin", 77), program("linux", 77)) == (None, None)


def test_one_process_runs_for_as_long_as_it_is_wanted() -> None:
    before, caffeine = len(children()), SleepInhibitor(SLEEPER)
    for awake, running in ((False, 0), (True, 1), (True, 1), (False, 0), (True, 1)):

        def is_so(awake: bool = awake, running: int = running) -> bool:
            caffeine.keep(awake)
            return len(children()) - before == running

        eventually(is_so, within_s=WAIT_S)
        assert is_so()
    caffeine.close()
    caffeine.close()
    assert len(children()) == before


@pytest.mark.parametrize("command", [["/nowhere/caffeinate"], [sys.executable, "-c", ""]])
def test_failing_sleep_inhibitor_is_logged_once(command: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caffeine = SleepInhibitor(command)

    def complained() -> bool:
        caffeine.keep(True)
        return bool(caplog.records)

    with caplog.at_level(logging.WARNING):
        eventually(complained, within_s=WAIT_S)
        for _ in range(3):
            caffeine.keep(True)
    assert len(caplog.records) == 1


@given(st.lists(st.tuples(st.floats(0.1, 100.0), st.booleans()), max_size=40))
def test_it_is_kept_awake_while_requests_run_and_a_moment_longer(looks: list[tuple[float, bool]]) -> None:
    wakefulness, now, busy_at = KeepAwake(), 0.0, None
    for passed_s, busy in looks:
        now += passed_s
        busy_at = now if busy else busy_at
        assert wakefulness.is_wanted(busy, now) == (busy_at is not None and now - busy_at < HOLD_S)
