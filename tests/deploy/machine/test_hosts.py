"""Checks of a hostfile's machines: the remote query, and findings from its answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.command.cli import app
from deploy.machine import hosts as hosts_module
from deploy.machine.doctor import Verdict
from deploy.machine.hosts import PACKAGES, HostAnswer, HostReport, ask, examine
from protocol.hosts import Backend, Host, Hosts

STAND_IN = """#!/bin/bash
# In place of ssh: options, a host, and a command that is run here.
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
echo "$1" >> "$(dirname "$0")/asked"
exec bash -c "$2"
"""

FILE = Path("hosts.json")
VERSIONS = dict.fromkeys(PACKAGES, "1.0")
WELL = HostReport("mac", VERSIONS, model=True, rdma=True)
HERE = Host("127.0.0.1", ["10.0.0.1"], [None, "rdma_en2"])
READY = Host("mac-2", ["10.0.0.2"], ["rdma_en2", None])
HOSTS = Hosts([HERE, READY])


def told(second: HostReport | None, backend: Backend = "ring", why: str = "") -> dict[str, str]:
    """Return the problems found with this report of the second machine, each with its advice."""
    findings = examine(FILE, HOSTS, backend, [HostAnswer(HERE, WELL), HostAnswer(READY, second, why)])
    return {f.text: f.advice for f in findings if f.verdict is Verdict.WRONG}


@pytest.mark.parametrize(
    ("second", "backend", "words", "advice"),
    [
        (None, "ring", "mac-2: Permission denied", "without a password"),
        (HostReport("m", VERSIONS | {"mlx": "0.9"}, True, True), "ring", "has mlx 0.9", "same versions"),
        (HostReport("m", VERSIONS, False, True), "ring", "no such model", "same folder"),
        (HostReport("m", VERSIONS, True, False), "jaccl", "no RDMA", "rdma_ctl enable"),
    ],
)
def test_missing_host_requirement_is_reported_with_advice(
    second: HostReport | None, backend: Backend, words: str, advice: str
) -> None:
    assert told(WELL, backend) == {}
    [(said, what)] = told(second, backend, "Permission denied").items()
    assert words in said
    assert "mac-2" in said
    assert advice in what


def test_machines_are_asked_here_and_over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(STAND_IN)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    here, there, lost = ask(Hosts([HERE, READY, Host("mac-3", python="/no/python")]), str(tmp_path))
    assert here.report.versions["mlx"]
    assert not here.report.model
    assert there.report == here.report
    assert lost.report is None
    assert "/no/python" in lost.why
    assert (tmp_path / "asked").read_text().split() == ["mac-2", "mac-3"]


def test_the_command_says_so_and_its_status_does(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    well = CliRunner().invoke(app, ["doctor", "--hosts", str(file)])
    assert well.exit_code == 0, well.output
    assert "rank 1" in well.output
    wrong = CliRunner().invoke(app, ["doctor", "--hosts", str(file), "--model", str(tmp_path)])
    assert wrong.exit_code == 1
    assert "no such model" in wrong.output


def test_silent_machine_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hangs = tmp_path / "python"
    hangs.write_text(f"#!{sys.executable}\nimport threading\nthreading.Event().wait()\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(hosts_module, "ANSWER_S_MAX", 0.05)
    [asked] = ask(Hosts([Host("127.0.0.1", ["10.0.0.1"], [None], python=str(hangs))]), "")
    assert (asked.report, asked.why) == (None, "no answer within 0.05 s")
