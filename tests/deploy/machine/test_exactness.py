"""The exactness table of `doctor`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.command.cli import app
from deploy.machine import doctor
from deploy.machine.facts import MachineFacts
from protocol.types import Capabilities, ContextFit, Exactness, ModelReport, PassCheck
from tests.models.fixtures import model_folder
from worker.interfaces import Model
from worker.load.load import ModelLoader
from worker.load.options import LoadOptions

FOUND = Exactness(
    checks=[
        PassCheck(kind="decode", rows=2),
        PassCheck(kind="decode", rows=16, difference=2e-5),
        PassCheck(kind="verify", rows=1, tokens=4, differs_at=3, difference=0.25),
        PassCheck(kind="prompts", rows=8),
        PassCheck(kind="chunks", rows=1, tokens=8),
    ],
    is_complete=False,
    rows_max=5,
    draft_tokens_max=3,
    chip=["bfloat16 matrix products are wrong"],
)
FIT = ContextFit(
    context_length=4096, tokens=3071, tokens_max=3071, row_bytes=6_300_000, cache_bytes=6_400_000
)


def test_a_model_is_measured_in_a_process_of_its_own_with_the_context_that_fits(tmp_path: Path) -> None:
    """By flags, or by the model's table of the settings file."""
    model, file = str(model_folder("dense")), tmp_path / "roundhouse.toml"
    limit = "[worker]\nmemory_limit_bytes = 9_000_000\n"
    file.write_text(f'{limit}[models.short]\nmodel = "{model}"\nkv_bits = 8\n')
    environ = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    report = doctor.measure(model, [f"--config={file}"], environ)
    assert report.exactness.is_complete
    assert {check.kind for check in report.exactness.checks} == {"decode", "verify", "prompts", "chunks"}
    lossy, exact = doctor.measure("short", [f"--config={file}"], environ).context, report.context
    assert exact.tokens < lossy.tokens <= exact.context_length
    assert exact.row_bytes <= exact.cache_bytes < 9_000_000
    folder = tmp_path / "roundhouse" / "exactness"
    loaded = ModelLoader(model, LoadOptions(exactness="limits", exactness_folder=folder)).load(
        lambda done, total: None
    )
    assert isinstance(loaded, Model)
    assert loaded.info.exactness == report.exactness


def test_failed_measurement_is_an_error_with_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(doctor.MeasurementError, match="config"):
        doctor.measure(str(tmp_path), [], os.environ)

    def late(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(doctor.MeasurementError, match="was not measured within"):
        doctor.measure("m", [], os.environ)


def test_command_prints_the_table_and_its_status_tells_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.machine.facts.gather", lambda host, port: MachineFacts(mlx="Device(gpu, 0)"))
    asked: list[list[str]] = []

    def measured(model: str, flags: list[str], environ: object) -> ModelReport:
        asked.append([model, *flags])
        return ModelReport(exactness=FOUND, context=FIT, capabilities=Capabilities(unread=["tool_calls"]))

    monkeypatch.setattr(doctor, "measure", measured)
    done = CliRunner().invoke(app, ["doctor", "--model", "org/model", "--kv-bits", "8"])
    assert asked == [["org/model", "--kv-bits=8"]]
    assert "3,071 of 4,096 tokens fit for one request" in done.output
    assert "org/model, compared with one row alone:" in done.output
    for line in (
        "same tokens, logprobs differ by up to 2e-05", "token 3 differs", "8 prompts together",
        "wants nothing unusual", "tool calls are in an unknown format",
        "at most 5 rows in a pass, drafts of up to 3 tokens",
    ):  # fmt: skip
        assert line in done.output
    wants = Capabilities(layout=["joins_system"])
    assert doctor.output(wants)[0] == ("ok", "template", "wants joins_system")
    assert doctor.output(Capabilities(template_problem="It fails.")) == [("wrong", "template", "It fails.")]
    assert doctor.output(Capabilities(image_problem="no tower"))[1] == (
        "note", "images", "not served: no tower",
    )  # fmt: skip
    assert done.exit_code == 1
