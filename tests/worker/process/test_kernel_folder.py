"""MLX's folder of compiled kernels is used only if no other user can write to it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.common import temporary_folder
from worker.process import kernel_folder


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tmp_path.chmod(0o1777)
    yield tmp_path
    temporary_folder.delete_all()


def test_the_folder_is_made_before_another_user_can(parent: Path) -> None:
    kernel_folder.protect()
    assert stat.S_IMODE((parent / "mlx").stat().st_mode) == 0o700
    assert os.environ["TMPDIR"] == str(parent)
    kernel_folder.protect()
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
    kernel_folder.protect()
    used = Path(os.environ["TMPDIR"])
    assert used.parent == parent
    assert stat.S_IMODE(used.stat().st_mode) == 0o700
    assert tempfile.gettempdir() == str(parent)
