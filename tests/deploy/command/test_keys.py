"""`roundhouse keys`: create, list and revoke, as the gateway then sees them."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from broker.middleware.auth import ApiKeys
from deploy.command.cli import app
from tests.deploy.conftest import config

pytestmark = pytest.mark.usefixtures("runtime_folder")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "roundhouse" / "api-keys"


def keys(*words: str) -> Result:
    return CliRunner().invoke(app, ["keys", *words])


def test_created_key_is_shown_once_and_stored_as_a_hash_for_its_owner_only(file: Path) -> None:
    made = keys("create", "ann", "--max-concurrent", "3")
    text = made.stdout.strip()
    assert made.exit_code == 0
    assert "from its next start on, `roundhouse serve` requires a key" in made.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert text not in file.read_text()
    found = ApiKeys((), file).find(text.encode())
    assert (found.name, found.concurrent_max) == ("ann", 3)
    listed = keys("list").stdout
    assert listed == f"{found.id}  ann  at most 3 in flight\n"
    assert sorted(path.name for path in file.parent.iterdir()) == ["api-keys"]


def test_gateway_that_runs_notices_new_and_revoked_keys(file: Path) -> None:
    first = keys("create", "ann").stdout.strip().encode()
    ring = ApiKeys((), file)
    second = keys("create", "bo").stdout.strip().encode()
    assert (ring.find(first) is None, ring.find(second) is None) == (False, False)
    assert keys("revoke", "ann").stdout.startswith("revoked ")
    assert (ring.find(first) is None, ring.find(second) is None) == (True, False)


def test_file_of_the_settings_is_changed_and_its_plain_lines_stay(file: Path, tmp_path: Path) -> None:
    old = tmp_path / "keys"
    file_of_settings = config(tmp_path, f"[serve]\napi_keys_file = '{old}'\n")
    old.touch(mode=0o600)
    old.write_text("# ours\nplain ann")
    assert keys("create", "bo", "--config", file_of_settings).exit_code == 0
    assert old.read_text().startswith("# ours\nplain ann\nsha256:")
    assert not file.exists()
    assert [key.name for key in ApiKeys((), old)._keys()] == ["ann", "bo"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [(["revoke", "nobody"], "has no key nobody"), (["revoke", "ann"], "create another one")],
)
def test_refusals_are_one_line_and_change_nothing(file: Path, words: list[str], complaint: str) -> None:
    keys("create", "ann")
    before = file.read_bytes()
    refused = keys(*words)
    assert refused.exit_code == 78
    assert complaint in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert file.read_bytes() == before


def test_file_that_others_can_read_or_another_command_changes_is_left_alone(file: Path) -> None:
    keys("create", "ann")
    file.chmod(0o644)
    assert "0600" in keys("create", "bo").stderr
    file.chmod(0o600)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        assert "being changed by another command" in keys("create", "bo").stderr
    finally:
        os.close(folder)
    assert keys("create", "bo").exit_code == 0
