"""Metal's command buffers are larger on the chips where that is faster, and MLX's folder of compiled kernels
is used only if no other user can write to it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.common import temporary_folder
from worker.process import environment
from worker.process.environment import LIMITS, MEGABYTES, OPERATIONS, raise_buffer_limits


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tmp_path.chmod(0o1777)
    yield tmp_path
    temporary_folder.delete_all()


def test_the_folder_is_made_before_another_user_can(parent: Path) -> None:
    environment.protect_kernels()
    assert stat.S_IMODE((parent / "mlx").stat().st_mode) == 0o700
    assert os.environ["TMPDIR"] == str(parent)
    environment.protect_kernels()
    assert os.environ["TMPDIR"] == str(parent)


@pytest.mark.parametrize("kind", ["writable", "a file", "a link to a shared folder"])
def test_another_folder_is_used_if_others_prepared_this_one(kind: str, parent: Path) -> None:
    folder = parent / "mlx"
    if kind == "a file":
        folder.touch()
    elif kind == "writable":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.symlink_to(parent)
    environment.protect_kernels()
    used = Path(os.environ["TMPDIR"])
    assert used.parent == parent
    assert stat.S_IMODE(used.stat().st_mode) == 0o700
    assert tempfile.gettempdir() == str(parent)


@pytest.mark.parametrize(
    ("chip", "raised"),
    [("Apple M1", True), ("Apple M4 Pro", True), ("Apple M5", False), ("Apple M10", False), ("", False)],
)
def test_limits_are_raised_up_to_m4(chip: str, raised: bool) -> None:
    environ: dict[str, str] = {}
    raise_buffer_limits(environ, chip)
    assert environ == (LIMITS if raised else {})


def test_a_limit_of_the_user_stays() -> None:
    environ = {OPERATIONS: "77"}
    raise_buffer_limits(environ, "Apple M2")
    assert environ == {OPERATIONS: "77", MEGABYTES: LIMITS[MEGABYTES]}
