"""The folder name of stored prefixes: equal for exactly the workers that can share them."""

from __future__ import annotations

from pathlib import Path

from worker.prefixes.folder import Folder

FINGERPRINT = "f1" * 16


def test_two_workers_with_one_folder_call_it_the_same_on_whatever_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    one, same = (Folder(path / "prefixes", FINGERPRINT) for path in (tmp_path, tmp_path / "link"))
    other = Folder(tmp_path / "others", FINGERPRINT)
    assert one.name == same.name != other.name
    assert one.name


def test_a_folder_that_cannot_be_had_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert Folder(tmp_path / "file" / "prefixes", FINGERPRINT).name == ""
