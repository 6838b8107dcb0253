"""The attacks at a small size, by their answers alone; and the verdict on what they cost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.faults.bodies import Answer
from tests.hosts import Images
from tests.security import attacks
from tests.security.attacker import AttackRun, attacked, fault_of, log_faults
from tests.security.payloads import MARK, SECRET
from tests.security.probe import probing
from tests.security.verdicts import (
    HI_S_MAX,
    Measurement,
    Readings,
    failures,
)
from tests.system import System

SCALE = 0.01
CHEAP = (
    "empty-objects", "images-damaged", "idle", "pipelined", "half-closed",
    "http10", "ssrf", "injections", "leaving",
)  # fmt: skip
"""Attacks that take a second or two at this size."""
CALM = Readings(hi_s=0.1, health_s=0.01, worker_bytes=2**20, answers=9)
MIB = 2**20


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


def test_probe_measures_a_calm_server(target: tuple[System, Images]) -> None:
    system, _ = target
    with probing(system.port, system.workers[-1].pid, system.gateway.pid) as probe:
        readings = probe.finish()
    assert readings.answers >= 1
    assert readings.unanswered == 0
    assert readings.hi_s > 0


# --- the verdict -------------------------------------------------------------------------------------


def judged(*wrong: str, **changes: Any) -> list[str]:
    return failures(Measurement("an-attack", 3, msgspec.structs.replace(CALM, **changes), wrong))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hi_s": HI_S_MAX + 0.1}, "a “hi” took 2.10 s"),
        ({"unanswered": 1}, "1 requests of the probe had no answer"),
    ],
)
def test_each_exceeded_limit_is_a_failure_that_names_the_attack(changes: dict[str, Any], words: str) -> None:
    assert judged() == []
    [failure] = judged(**changes)
    assert failure.startswith("an-attack: ")
    assert words in failure


# --- the checks of answers and logs ------------------------------------------------------------------


def error(**changes: Any) -> bytes:
    told = {"message": "No.", "type": "invalid_request_error", "param": None, "code": "invalid_request"}
    return msgspec.json.encode({"error": told | changes})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(500, {}, error()), "status 500"),
        (Answer(400, {}, b"oops"), "without an error object"),
        (Answer(400, {}, error(code="nonsense")), "an incomplete error object"),
        (Answer(200, {"injected": "yes"}, b""), "a header was injected"),
    ],
)
def test_answer_of_another_status_or_shape_is_a_fault(answer: Answer, words: str) -> None:
    assert words in (fault_of(answer, {200, 400}) or "")
    assert fault_of(Answer(400, {}, error()), {200, 400}) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"12:00:00 gateway GET /a\n{MARK} 12:00:01 gateway stopping", "forged line"),
        ("12:00:00 gateway \x1b[2J", "control character"),
        (f"12:00:00 gateway asks: {SECRET}", "a prompt"),
        ("Traceback (most recent call last):\n  File", "a traceback"),
    ],
)
def test_forged_or_revealing_log_line_is_a_fault(line: str, words: str) -> None:
    assert any(words in fault for fault in log_faults(line))
    assert log_faults("12:00:00 gateway  'a\\x1b[2J' is unknown\n") == []
    planned = "12:00:00 worker error: chatcmpl-1: grammar failed\nTraceback (most recent call last):\n  File"
    assert log_faults(planned, "grammar failed") == []
    assert log_faults(planned, "another failure") == log_faults(planned) != []
