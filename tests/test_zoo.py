"""The test of all model families: crashes of its processes, and the table of outcomes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict

import pytest

from tests.worker.families import Outcome
from tests.zoo import main, prove_all

OUTCOMES = [
    Outcome("afm7", "equal", reuse="anywhere", why="cannot be batched: a|b"),
    Outcome("bitnet", "refused", why="it is made for another device."),
    Outcome("plamo3", "equal", batched=True, padded=True, reuse="within windows", why="cuts show"),
]
ANSWERS = {outcome.family: json.dumps(asdict(outcome)) for outcome in OUTCOMES}
PROVER = f"""
import sys
answers = {ANSWERS!r}
for line in sys.stdin:
    if line.strip() not in answers:
        sys.exit(7)
    print("upstream says something")
    print(answers[line.strip()], flush=True)
"""


def test_outcomes_come_in_order_and_a_process_that_dies_is_one_of_them() -> None:
    names = ["plamo3", "fatal", "afm7", "bitnet"]
    outcomes = prove_all(names, [sys.executable, "-c", PROVER], lanes=1)
    died = Outcome("fatal", "wrong", why="its process died with status 7")
    assert outcomes == [*OUTCOMES[:2], died, OUTCOMES[2]]
    assert prove_all(names, [sys.executable, "-c", PROVER], lanes=3) == outcomes


def test_a_family_is_proven_by_the_command_of_the_makefile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a refused family; `tests.worker.test_families` tests others."""
    monkeypatch.setattr(sys, "argv", ["tests.zoo", "--seeds", "1", "--lanes", "1", "olmo"])
    assert main() == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("olmo: refused, ")
    assert re.fullmatch(r"1 families in \d+ s, 0 wrong", last)
