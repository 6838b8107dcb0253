"""The exactness table of `doctor`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.command.cli import app
from deploy.machine import exactness
from deploy.machine.facts import MachineFacts
from protocol.types import Exactness, PassCheck
from tests.models.fixtures import model_folder

FOUND = Exactness(
    checks=[
        PassCheck(kind="decode", rows=2),
        PassCheck(kind="decode", rows=16, difference=2e-5),
        PassCheck(kind="verify", rows=1, tokens=4, differs_at=3, difference=0.25),
        PassCheck(kind="prompts", rows=8),
        PassCheck(kind="chunks", rows=1, tokens=8),
    ],
    is_complete=False,
    chip=["bfloat16 matrix products are wrong"],
)


def test_each_kind_of_pass_has_a_line() -> None:
    assert exactness.lines(FOUND) == [
        ("decode, 2 rows", "ok", "equal"),
        ("decode, 16 rows", "ok", "same tokens, logprobs differ by up to 2e-05"),
        ("verify, 1 row × 4 tokens", "note", "token 3 differs, logprobs by up to 0.2"),
        ("8 prompts together", "ok", "equal"),
        ("prompt in chunks of 8", "ok", "equal"),
        ("the rest", "note", "not measured for lack of time"),
        ("chip", "wrong", "bfloat16 matrix products are wrong"),
    ]


def test_a_model_is_loaded_and_measured_in_a_process_of_its_own() -> None:
    found = exactness.measure(str(model_folder("llama")))
    assert found.is_complete
    assert {check.kind for check in found.checks} == {"decode", "verify", "prompts", "chunks"}


def test_a_model_that_cannot_be_measured_is_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(exactness.MeasurementError, match="config"):
        exactness.measure(str(tmp_path))

    def late(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(exactness.MeasurementError, match="was not measured within"):
        exactness.measure("m")


def test_the_command_prints_the_table_and_its_status_tells_wrong_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploy.machine.facts.gather", lambda port: MachineFacts(mlx="Device(gpu, 0)"))
    monkeypatch.setattr(exactness, "measure", lambda model: FOUND)
    done = CliRunner().invoke(app, ["doctor", "--model", "org/model"])
    assert "org/model, compared with one row alone:" in done.output
    assert "token 3 differs" in done.output
    assert done.exit_code == 1

    def fails(model: str) -> Exactness:
        raise exactness.MeasurementError("org/model: no such folder.")

    monkeypatch.setattr(exactness, "measure", fails)
    failed = CliRunner().invoke(app, ["doctor", "--model", "org/model"])
    assert failed.exit_code != 0
    assert "no such folder" in failed.output
