"""Calls of the package manager."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import environments
from tests.conformance.drivers import Environment


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the package manager by one that writes each call to the returned file."""
    notes, manager = tmp_path / "notes", tmp_path / "manager"
    manager.write_text(f'#!/bin/sh\necho "$@" >> {notes}\n')
    manager.chmod(0o755)
    monkeypatch.setattr(environments, "UV", str(manager))
    return notes


def test_excluded_package_is_overridden_with_an_unsatisfiable_marker(told: Path, tmp_path: Path) -> None:
    place = environments.make(Environment("one", "python", ("a==1",), without=("torch",)), tmp_path / "made")
    assert (place / ".overrides").read_text() == "torch; python_version < '3'\n"
    assert f"--override {place / '.overrides'} a==1" in told.read_text().splitlines()[-1]


def test_an_environment_is_made_again_when_something_else_is_left_out(told: Path, tmp_path: Path) -> None:
    for without in ((), (), ("torch",)):
        environments.make(Environment("one", "python", ("a==1",), without=without), tmp_path / "made")
    assert len(told.read_text().splitlines()) == 4
