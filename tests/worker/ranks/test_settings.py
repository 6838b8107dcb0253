"""Worker settings from the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from protocol.common.cache_folder import cache_folder, prefix_folder
from protocol.settings import reader as settings
from protocol.settings.worker import WorkerSettings
from worker.process.watchdog import STALL_S_MAX
from worker.ranks.loader import SET_STALL_S_MAX, of_set


def read(*argv: str) -> WorkerSettings:
    return settings.read(WorkerSettings, "worker", argv, {}, program="worker", about="")


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--memory-limit-bytes", "many"),
        ("--prefix-cache-disk", "4 apples"),
        ("--prefix-cache-dir", ""),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(flag: str, text: str) -> None:
    with pytest.raises(settings.SettingsError, match=flag[2:].replace("-", "_")):
        read(flag, text)


def test_prefixes_are_kept_as_set_or_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")
    assert prefix_folder(None, os.environ, sys.platform) == tmp_path / "cache" / "roundhouse" / "prefixes"
    assert prefix_folder(Path("elsewhere"), os.environ, sys.platform) == Path("elsewhere")


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({"XDG_CACHE_HOME": ""}, "linux", ".cache/roundhouse"),
        ({"XDG_CACHE_HOME": "/var/cache/me"}, "linux", "/var/cache/me/roundhouse"),
        ({"XDG_CACHE_HOME": "/var/cache/me"}, "darwin", "Library/Caches/roundhouse"),
    ],
)
def test_the_users_cache_folder_is_the_platforms(
    environ: dict[str, str], platform: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(environ, platform) == tmp_path / expected


def test_a_set_keeps_nothing_on_disk_and_gives_up_soon_unless_told_otherwise() -> None:
    assert of_set(read()).prefix_cache_disk == 0
    assert of_set(read()).stall_timeout_s == SET_STALL_S_MAX < STALL_S_MAX
    assert of_set(read("--stall-timeout", "300")).stall_timeout_s == 300
