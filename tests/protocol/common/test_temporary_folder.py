"""Temporary folders are deleted at the end of their process, or by the next one."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.common import temporary_folder
from protocol.common.temporary_folder import TemporaryFolder

OTHER = """
import os, sys, time
from protocol.common import temporary_folder
folder = temporary_folder.TemporaryFolder("ranks")
(folder.path / "file").touch()
print(folder.path, flush=True)
sys.stdin.read()
temporary_folder.delete_all()
os._exit(0)
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    temporary_folder.delete_all()


def other() -> tuple[subprocess.Popen[str], Path]:
    """Start another process with a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str], number: int = 0) -> None:
    if number:
        process.send_signal(number)
    process.communicate(timeout=30)


def test_an_exit_without_clean_up_leaves_nothing(parent: Path) -> None:
    with TemporaryFolder("probe") as folder:
        assert folder.parent == parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "below").mkdir()
        (folder / "below" / "file").touch()
    assert list(parent.iterdir()) == []
    first, second = TemporaryFolder("probe"), TemporaryFolder("video")
    temporary_folder.delete_all()
    first.delete()
    second.delete()
    assert list(parent.iterdir()) == []
    process, path = other()
    assert path.exists()
    end(process)
    assert list(parent.iterdir()) == []


def test_the_folder_of_a_killed_process_is_deleted_by_the_next_and_that_of_a_live_one_stays(
    parent: Path,
) -> None:
    killed, stale = other()
    end(killed, signal.SIGKILL)
    assert (stale / "file").exists()
    alive, used = other()
    assert not stale.exists()
    with TemporaryFolder("probe"):
        assert (used / "file").exists()
    end(alive)
    assert list(parent.iterdir()) == []


def test_folders_that_are_not_ours_stay(parent: Path) -> None:
    (parent / "roundhouse-ranks-mine").mkdir()
    shared = parent / "roundhouse-ranks-shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / ".roundhouse-lock").touch()
    (parent / "elsewhere").mkdir(mode=0o700)
    (parent / "elsewhere" / ".roundhouse-lock").touch()
    (parent / "roundhouse-link").symlink_to(parent / "elsewhere")
    linked = parent / "roundhouse-ranks-linked"
    linked.mkdir(mode=0o700)
    (linked / ".roundhouse-lock").symlink_to(parent / "elsewhere" / ".roundhouse-lock")
    before = set(parent.rglob("*"))
    with pytest.raises(OSError, match="symbolic links"):
        os.open(linked / ".roundhouse-lock", os.O_RDWR | os.O_NOFOLLOW)
    TemporaryFolder("probe").delete()
    assert set(parent.rglob("*")) == before
