"""The test of all model families, by its command."""

from __future__ import annotations

import re
import sys

import pytest

from tests.zoo import main


def test_a_family_is_proven_by_the_command_of_the_makefile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a refused family; `tests.worker.test_families` tests others."""
    monkeypatch.setattr(sys, "argv", ["tests.zoo", "--seeds", "1", "--lanes", "1", "olmo"])
    assert main() == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("olmo: refused, ")
    assert re.fullmatch(r"1 families in \d+ s, 0 wrong", last)
