"""The GitHub workflows, which cannot run here: what they run exists, on macOS and Linux, with a bound."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.command.cli import app

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS: dict[str, Any] = {
    file.stem: yaml.safe_load(file.read_text()) for file in sorted((ROOT / ".github/workflows").glob("*.yml"))
}
JOBS: dict[str, Any] = {name: job for flow in WORKFLOWS.values() for name, job in flow["jobs"].items()}
SCRIPTS = [(name, step["run"]) for name, job in JOBS.items() for step in job["steps"] if "run" in step]
ON_METAL = {"model"}
"""Jobs that Linux is not needed for."""


@pytest.mark.parametrize("name", JOBS)
def test_each_job_runs_on_macos_and_linux_with_a_bound(name: str) -> None:
    job = JOBS[name]
    systems = {system.partition("-")[0] for system in job["strategy"]["matrix"]["os"]}
    assert systems == ({"macos"} if name in ON_METAL else {"macos", "ubuntu"})
    assert job["runs-on"] == "${{ matrix.os }}"
    assert 0 < job["timeout-minutes"] <= 90


def test_lint_and_tests_run() -> None:
    ran = [script.strip() for name, script in SCRIPTS if name == "test"]
    assert {"make lint", "make test"} <= set(ran)
    called = re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {"lint", "test"} <= set(called)


@pytest.mark.parametrize(("job", "script"), SCRIPTS)
def test_each_script_is_shell_and_names_only_what_exists(job: str, script: str) -> None:
    plain = re.sub(r"\$\{\{.*?\}\}", "value", script)
    subprocess.run(["bash", "-n"], input=plain, text=True, check=True, timeout=30)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake (\w+)", plain)) <= set(targets)
    commands = {each.name or each.callback.__name__ for each in app.registered_commands if each.callback}
    assert set(re.findall(r"\broundhouse ([a-z]+)", plain)) <= commands
    for module in re.findall(r"-m (tests[.\w]+|mlx_lm)", plain):
        assert importlib.util.find_spec(module), module
