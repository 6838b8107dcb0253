"""A release: what is built is built again from the source, its notes and checksums, and its signature."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from recipes.homebrew import LOCK, locked_hashes
from recipes.installed import newer_than_locked
from recipes.release import (
    ReleaseError,
    build,
    next_steps,
    notes_of,
    pythons,
    sign,
    sums_of,
    verify,
    without_hashes,
)

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.1.0] - 2026-12-01\n\n### Serving\n\n- first\n"


def test_the_source_builds_the_wheel_and_has_what_a_release_is_made_from(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert len(list(tmp_path.glob("*.tar.gz"))) == 1


def test_notes_are_the_section_of_the_version_or_a_draft() -> None:
    assert notes_of(CHANGELOG, "0.1.0") == ("### Serving\n\n- first", True)
    assert notes_of(CHANGELOG, "0.2.0") == ("- new", False)
    assert [line[0] for line in next_steps("0.2.0", Path("dist"), False, True)] == ["#"]
    steps = next_steps("0.1.0", Path("dist"), True, False)
    assert steps[0].startswith("# not signed")
    assert steps[1].startswith("git tag --sign v0.1.0 ")
    assert next_steps("0.1.0", Path("dist"), True, True) == steps[1:]


def test_constraints_are_the_requirements_without_hashes() -> None:
    lock = LOCK.read_text()
    lines = [line for line in without_hashes(lock).splitlines() if not line.startswith("#")]
    assert [line.split(" ;")[0] for line in lines] == list(locked_hashes(lock))


def test_what_is_newer_than_the_lock_is_told() -> None:
    lock = "numpy==1 ; python_full_version < '3.12'\nnumpy==2 ; python_full_version >= '3.12'\n"
    told = newer_than_locked({"numpy": "3", "pip": "1"}, lock)
    assert told == ["numpy 3 (1, 2 locked)", "pip 1 (not locked)"]
    assert not newer_than_locked({"numpy": "2"}, lock)


def test_checksums_are_signed_and_what_was_changed_is_refused(tmp_path: Path) -> None:
    key, other, sums = tmp_path / "key", tmp_path / "other", tmp_path / "SHA256SUMS"
    for each in (key, other):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "a releaser", "-f", str(each)]
        subprocess.run(command, check=True, timeout=60)
    sums.write_text(sums_of([other]))
    signature, public = sign(sums, key), (tmp_path / "key.pub").read_text()
    verify(sums, signature, public)
    with pytest.raises(ReleaseError, match="ssh-keygen"):
        verify(sums, signature, (tmp_path / "other.pub").read_text())
    sums.write_text(sums_of([key]))
    with pytest.raises(ReleaseError, match="ssh-keygen"):
        verify(sums, signature, public)
    assert sign(sums, key) == signature


def test_every_python_that_is_named_is_checked() -> None:
    assert pythons() == ["3.11", "3.12", "3.13", "3.14"]
