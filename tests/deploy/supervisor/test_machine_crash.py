"""A crash of the machine is logged at the next start."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from deploy.supervisor.machine_crash import CRASHED, crash_logged


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "Library" / "Caches" / "roundhouse" / "runs"


def test_a_file_that_is_older_than_the_boot_is_logged_once(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with crash_logged(os.environ, "darwin"):
        (file,) = runs.iterdir()
        later = time.time() + 3600
        with crash_logged(os.environ, "darwin", boot_at=later):  # the first one still runs
            assert len(list(runs.iterdir())) == 2
        assert not caplog.messages
        (runs / "left.run").write_bytes(b"")  # of a process that was killed, or that the machine took along
    assert not file.exists()
    for boot_at, logged in ((later, [CRASHED]), (later, [])):
        caplog.clear()
        with crash_logged(os.environ, "darwin", boot_at=boot_at):
            assert caplog.messages == logged
    (runs / "left.run").write_bytes(b"")
    with crash_logged(os.environ, "darwin", boot_at=0.0):
        assert len(list(runs.iterdir())) == 1
    assert not caplog.messages


def test_other_systems_and_an_unwritable_folder_are_no_failure(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with crash_logged(os.environ, "linux"):
        assert not runs.exists()
    runs.parent.mkdir(parents=True)
    runs.write_text("a file")
    with crash_logged(os.environ, "darwin"):
        assert "would not be noticed" in caplog.text
