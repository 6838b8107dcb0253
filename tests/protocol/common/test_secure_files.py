"""Files and folders with secrets."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import psutil
import pytest

from protocol.common.secure_files import SECRET_BYTES_MAX, is_private, is_protected, read_private


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"x")
    path.chmod(0o600)
    return path


def test_a_file_of_ours_alone_is_read_through_a_link_too_up_to_a_limit(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    assert read_private(file) == read_private(link) == b"x"
    file.write_bytes(b"x" * SECRET_BYTES_MAX)
    assert len(read_private(file)) == SECRET_BYTES_MAX
    file.write_bytes(b"x" * (SECRET_BYTES_MAX + 1))
    with pytest.raises(OSError, match="larger than"):
        read_private(file)


def test_what_is_open_to_others_or_no_file_is_refused_without_blocking(file: Path, tmp_path: Path) -> None:
    for permissions in (0o601, 0o604, 0o620, 0o640):
        file.chmod(permissions)
        with pytest.raises(PermissionError, match="0600"):
            read_private(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(OSError, match="not a file"):
        read_private(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        read_private(tmp_path)


def test_refused_files_are_closed(file: Path, tmp_path: Path) -> None:
    gc.collect()  # else descriptors left by earlier tests might be closed meanwhile
    before = psutil.Process().num_fds()
    file.chmod(0o644)
    for refused in (file, tmp_path, tmp_path / "missing"):
        with pytest.raises((PermissionError, IsADirectoryError, FileNotFoundError)):
            read_private(refused)
    assert psutil.Process().num_fds() == before


def test_a_folder_is_private_while_only_its_owner_can_enter(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    assert is_private(folder)
    folder.chmod(0o750)
    assert not is_private(folder)


@pytest.mark.parametrize(
    ("above", "below", "expected"),
    [
        (0o755, 0o755, True), (0o1777, 0o755, True),
        (0o777, 0o700, False), (0o755, 0o1777, False), (0o720, 0o700, False),
    ],
)  # fmt: skip
def test_a_folder_is_protected_if_nobody_else_can_replace_what_is_in_it(
    above: int, below: int, expected: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "above" / "below"
    folder.mkdir(parents=True)
    folder.chmod(below)
    folder.parent.chmod(above)
    assert is_protected(folder) == expected
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert is_protected(link) == expected


@pytest.mark.parametrize("theirs", ["link", "folder", "."])
def test_a_folder_or_a_link_of_somebody_else_is_not_protected(
    theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    (tmp_path / "folder" / "below").mkdir(parents=True)
    link.symlink_to(tmp_path / "folder")
    stat, lstat, changed = Path.stat, Path.lstat, tmp_path / theirs

    def of_somebody_else(info: os.stat_result, path: Path) -> os.stat_result:
        return os.stat_result((*info[:4], os.geteuid() + 1, *info[5:])) if path == changed else info

    monkeypatch.setattr(Path, "stat", lambda path, **how: of_somebody_else(stat(path, **how), path))
    monkeypatch.setattr(Path, "lstat", lambda path: of_somebody_else(lstat(path), path))
    assert not is_protected(link / "below")
    monkeypatch.undo()
    assert is_protected(link / "below")
