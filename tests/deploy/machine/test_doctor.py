"""Checks of a machine by `roundhouse doctor`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from deploy.command.cli import app
from deploy.machine import facts as facts_module
from deploy.machine.doctor import Finding, Verdict, examine
from deploy.machine.facts import MachineFacts, MachineMemory, listening_process
from deploy.machine.report import of_findings
from tests.ports import free_port

GB = 10**9
WELL: dict[str, Any] = {
    "python": (3, 12, 1),
    "system": "Darwin",
    "release": "15.1",
    "machine": "arm64",
    "memory": MachineMemory(64 * GB, 48 * GB, wired_limit=48 * GB),
    "mlx": "Device(gpu, 0)",
    "cache": "/caches/hub",
    "disk_free": 500 * GB,
    "files_max": 10_000,
}


def findings(**wrong: Any) -> list[Finding]:
    return examine(MachineFacts(**WELL | wrong))


def test_where_all_is_well_nothing_is_to_be_done() -> None:
    found = findings()
    assert {finding.verdict for finding in found} == {Verdict.WELL}
    assert [finding.about for finding in found] == [
        "Python", "system", "MLX", "memory", "models that fit", "experts on disk",
        "models here", "disk", "port 8000",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "about", "verdict", "advice"),
    [
        ({"machine": "x86_64"}, "system", Verdict.WRONG, "Rosetta"),
        (
            {"system": "Linux", "mlx": "Device(cpu, 0)", "cuda_package": "mlx-cuda-13"},
            "MLX",
            Verdict.WRONG,
            "--no-deps mlx-cuda-13",
        ),
        ({"port_user": "another program"}, "port 8000", Verdict.NOTE, "--port"),
        ({"memory": MachineMemory(64 * GB, 48 * GB)}, "memory", Verdict.WELL, "wired_limit_mb=51879"),
        ({"system": "Linux", "has_compiler": False}, "compiler", Verdict.NOTE, "apt install g++"),
        ({"mlx": "", "mlx_error": "no module"}, "MLX", Verdict.WRONG, "--force-reinstall mlx"),
        ({"cache_writable": False}, "models here", Verdict.WRONG, "chown /caches/hub"),
        ({"keeps_awake": False}, "sleep", Verdict.NOTE, "fall asleep"),
        ({"port_user": "roundhouse"}, "port 8000", Verdict.WELL, "roundhouse status"),
    ],
)
def test_fault_is_named_with_advice(wrong: dict[str, Any], about: str, verdict: Verdict, advice: str) -> None:
    [finding] = [finding for finding in findings(**wrong) if finding.about == about]
    assert finding.verdict is verdict
    assert advice in finding.advice
    others = {each.verdict for each in findings(**wrong) if each.about != about}
    assert others == {Verdict.WELL}


def test_a_system_or_memory_too_small_is_named() -> None:
    [system] = [finding for finding in findings(release="13.6") if finding.about == "system"]
    assert (system.verdict, "needs macOS 14" in system.advice) == (Verdict.WRONG, True)
    small = findings(memory=MachineMemory(2 * GB, GB // 8, wired_limit=GB))
    [fits] = [finding for finding in small if finding.about == "models that fit"]
    assert (fits.verdict, fits.text) == (Verdict.NOTE, "only the embedded one")


def test_several_faults_are_all_named() -> None:
    found = findings(python=(3, 10, 4), disk_free=3 * GB, runtime_error="too long", files_max=256)
    wrong = {finding.about for finding in found if finding.verdict is not Verdict.WELL}
    assert wrong == {"Python", "disk", "sockets", "open files"}


def test_a_port_is_free_or_somebodys() -> None:
    assert listening_process("127.0.0.1", free_port()) == ""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert listening_process("127.0.0.1", silent.getsockname()[1]) == "another program"


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "none yet"), "XDG_RUNTIME_DIR": str(tmp_path)}
    file = tmp_path / "report.json"
    told = subprocess.run(
        [sys.executable, "-m", "deploy", "doctor", "--port", str(free_port()), "--report", str(file)],
        capture_output=True, text=True, timeout=90, env=env, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    lines = {line[6:22].strip(): line for line in told.stdout.splitlines() if line[0] != " "}
    assert "uses Device" in lines["MLX"]
    assert lines["models here"].startswith("ok")
    written = file.read_text()
    assert written in told.stdout, "shown before it is written"
    report = json.loads(written)
    assert report["machine"]["device"] in lines["MLX"]
    assert {"python", "mlx-roundhouse", "mlx", "transformers"} <= set(report["versions"])
    assert {"MLX", "memory"} <= {finding["about"] for finding in report["findings"]}
    private = {str(Path.home()), str(tmp_path), socket.gethostname()}
    assert [word for word in private if word in written] == []


def test_a_report_names_no_home_and_is_of_one_machine() -> None:
    error = "dlopen(/people/ada/env/libmlx.dylib): no such file"
    written = of_findings(findings(mlx="", mlx_error=error, cache="/people/ada/hub"), "/people/ada")
    assert "ada" not in str(written)
    assert any("dlopen(~/env/" in each["text"] for each in written)
    asked = CliRunner().invoke(app, ["doctor", "--hosts=hosts.json", "--report=-"])
    assert (asked.exit_code, "of this machine" in asked.stderr) == (2, True)


def test_an_mlx_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "MLX_S_MAX", 0.05)
    monkeypatch.setattr(facts_module, "_TRY_MLX", "import threading; threading.Event().wait()")
    device = facts_module._try_mlx()
    assert (device.name, device.own_bytes) == ("", 0)
    assert "timed out after 0.05 seconds" in device.error


def test_models_have_to_fit_into_a_gpu_that_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "_TRY_MLX", "print('Device(gpu, 0)\\n{\"total_memory\": 7000000000}')")
    device = facts_module._try_mlx()
    assert (device.name, device.own_bytes, device.error) == ("Device(gpu, 0)", 7 * GB, "")
    assert facts_module.read_memory("linux", device.own_bytes).usable == 7 * GB
    for package, found in (("mlx-cuda-13", 7 * GB), ("", 0)):
        monkeypatch.setattr(facts_module, "cuda_package", lambda package=package: package)
        assert facts_module.gpu_bytes() == found
    assert facts_module.read_memory("linux").usable == psutil.virtual_memory().total
