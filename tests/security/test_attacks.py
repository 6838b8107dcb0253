"""The attacks at a small size, by their answers alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.faults.bodies import Answer
from tests.hosts import Images
from tests.security import attacks
from tests.security.attacker import AttackRun, attacked, fault_of, log_faults
from tests.security.payloads import MARK, SECRET
from tests.system import System

SCALE = 0.01
CHEAP = (
    "empty-objects", "images-damaged", "idle", "pipelined", "half-closed",
    "http10", "ssrf", "injections", "leaving",
)  # fmt: skip
"""Attacks that take a second or two at this size."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[System, Images]]:
    with attacked(tmp_path_factory.mktemp("attacked")) as target:
        yield target


@pytest.mark.parametrize("name", CHEAP)
def test_small_attack_gets_the_promised_answers(name: str, target: tuple[System, Images]) -> None:
    run = AttackRun(*target, random.Random(name), SCALE)
    asyncio.run(attacks.ATTACKS[name](run))  # type: ignore[arg-type]
    run.check_processes()
    assert run.wrong == []
    assert run.requests > 0


def test_a_wrong_answer_and_a_forged_or_revealing_log_line_are_faults() -> None:
    assert "status 500" in (fault_of(Answer(500, {}, b"{}"), {200}) or "")
    assert "without an error object" in (fault_of(Answer(400, {}, b"oops"), {400}) or "")
    for line in (
        f"gateway GET /a\n{MARK} gateway stopping",
        "\x1b[2J",
        SECRET,
        "Traceback (most recent call",
    ):
        assert len(log_faults(line)) == 1
    assert log_faults("12:00:00 gateway  'a\\x1b[2J' is unknown\n") == []
