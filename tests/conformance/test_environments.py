"""What the package manager is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import environments
from tests.conformance.drivers import Environment


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A line for each call of a manager that only notes what it is told."""
    notes, manager = tmp_path / "notes", tmp_path / "manager"
    manager.write_text(f'#!/bin/sh\necho "$@" >> {notes}\n')
    manager.chmod(0o755)
    monkeypatch.setattr(environments, "UV", str(manager))
    return notes


def test_what_is_left_out_is_overridden_for_no_python_there_is(told: Path, tmp_path: Path) -> None:
    place = environments.make(Environment("one", "python", ("a==1",), without=("torch",)), tmp_path / "made")
    assert (place / ".overrides").read_text() == "torch; python_version < '3'\n"
    assert f"--override {place / '.overrides'} a==1" in told.read_text().splitlines()[-1]


def test_an_environment_is_made_again_when_something_else_is_left_out(told: Path, tmp_path: Path) -> None:
    for without in ((), (), ("torch",)):
        environments.make(Environment("one", "python", ("a==1",), without=without), tmp_path / "made")
    assert len(told.read_text().splitlines()) == 4
