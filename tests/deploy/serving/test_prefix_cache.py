"""Prefix cache on disk, seen from outside of the workers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.command.cli import app
from deploy.serving import prefix_cache
from deploy.serving.prefix_cache import first_start_notice
from deploy.serving.resolution import resolve
from tests.deploy.conftest import config
from tests.ports import free_port
from worker.core.prefix.folder import Folder, Record, prepare

pytestmark = pytest.mark.usefixtures("runtime_folder")

MODEL, NOW = "cb514db773a2", 1_700_000_000.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the prefix cache with two prefixes of one model, as a worker writes them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")
    folder = tmp_path / "cache" / "roundhouse" / "prefixes"
    for number, digest in enumerate(("0123abcd", "4567cdef")):
        Folder(folder / MODEL, MODEL).save(prepare(Record(digest, {}, {}), MODEL))
        os.utime(folder / MODEL / f"{digest}.prefix.safetensors", (0, NOW - 60 * number))
    return folder


def folders(*argv: str) -> dict[Path, int]:
    return prefix_cache.folders(resolve(argv, os.environ).first_plans, os.environ)


def test_folders_are_those_of_the_workers_settings(folder: Path, tmp_path: Path) -> None:
    assert folders() == {folder: 4 * 2**30}
    assert folders("--prefix-cache-disk", "0") == folders("--prefix-cache-ram", "0") == {}
    text = f"[worker]\nprefix_cache_disk = '1MiB'\n[models.a]\n[models.b]\nprefix_cache_dir = '{tmp_path}/b'"
    assert folders(f"--config={config(tmp_path, text)}") == {folder: 2**20, tmp_path / "b": 2**20}


def test_notice_comes_at_the_start_that_creates_the_folder_only(folder: Path, tmp_path: Path) -> None:
    new = tmp_path / "new" / "prefixes"
    notice = first_start_notice({folder: 1, new: 3 * 2**30})
    assert f"in {new}: at most 3GiB for each model" in notice
    assert "--prefix-cache-disk 0" in notice
    assert len(notice.splitlines()) == 1
    assert stat.S_IMODE(new.stat().st_mode) == 0o700
    assert first_start_notice({folder: 1, new: 3 * 2**30}) == ""
    assert first_start_notice({}) == ""


def test_clear_deletes_prefixes_and_nothing_else(folder: Path) -> None:
    model, elsewhere = folder / MODEL, folder.parent / "elsewhere"
    names = ("notes.txt", "x.safetensors", "89abcdef.7-01234567.part", "89abcdef.8-01234567.part")
    for name in names:
        (model / name).write_text("1234")
    os.utime(model / names[3], (0, NOW - 601))
    os.utime(model / names[2], (0, NOW - 599))
    elsewhere.mkdir()
    (elsewhere / "a.prefix.safetensors").touch()
    (folder / "link").symlink_to(elsewhere)
    prefix_cache.clear(folder, NOW)
    assert sorted(file.name for file in model.iterdir()) == sorted(names[:3])
    assert (elsewhere / "a.prefix.safetensors").exists()
    prefix_cache.clear(folder / "nowhere", NOW)


def test_commands_show_and_clear_the_cache_where_no_server_runs(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["cache", "--port", str(free_port())])
    assert shown.exit_code == 0, shown.output
    assert ", at most 4.0 GiB for each model; " in shown.stdout
    assert " GB" not in shown.stdout
    assert str(folder) in shown.stdout
    assert MODEL in shown.stdout
    assert "2 files" in shown.stdout
    cleared = CliRunner().invoke(app, ["cache", "clear", "--port", str(free_port())])
    assert (cleared.exit_code, f"{folder}: deleted " in cleared.stdout) == (0, True), cleared.output
    assert MODEL not in CliRunner().invoke(app, ["cache"]).stdout
