"""The GitHub workflow, which cannot run here: what it runs exists, on macOS and Linux, with every Python."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.command.cli import app

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]
SCRIPTS = [(name, step["run"]) for name, job in JOBS.items() for step in job["steps"] if "run" in step]
SYSTEMS = {"macos", "ubuntu"}


@pytest.mark.parametrize("name", JOBS)
def test_each_job_runs_on_macos_and_linux_with_a_bound(name: str) -> None:
    job = JOBS[name]
    assert {system.partition("-")[0] for system in job["strategy"]["matrix"]["os"]} == SYSTEMS
    assert job["runs-on"] == "${{ matrix.os }}"
    assert 0 < job["timeout-minutes"] <= 90


def test_lint_and_tests_run() -> None:
    ran = [script.strip() for name, script in SCRIPTS if name == "test"]
    assert {"make lint", "make test"} <= set(ran)
    called = re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {"lint", "test"} <= set(called)


@pytest.mark.parametrize(("job", "script"), SCRIPTS)
def test_each_script_is_shell_and_names_only_targets_and_commands_that_exist(job: str, script: str) -> None:
    plain = re.sub(r"\$\{\{.*?\}\}", "value", script)
    subprocess.run(["bash", "-n"], input=plain, text=True, check=True, timeout=30)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake (\w+)", plain)) <= set(targets)
    commands = {each.name or each.callback.__name__ for each in app.registered_commands if each.callback}
    assert set(re.findall(r"\broundhouse ([a-z]+)", plain)) <= commands


def test_every_python_that_the_package_names_gets_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert JOBS["wheel"]["strategy"]["matrix"]["python"] == named
