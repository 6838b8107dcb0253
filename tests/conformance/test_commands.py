"""`make conformance`: its programs start, and its workers answer real SDKs through a real gateway."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from tests.commands import check_arguments
from tests.conformance.__main__ import COMMANDS, SMOKES
from tests.conformance.environments import variables
from tests.conformance.programs import run
from tests.conformance.servers import HOUSES, MODEL, opened
from tests.system import NO_TLS, running_system

DRIVERS = ("openai_smoke.py", "anthropic_smoke.py")
"""The drivers whose SDKs are installed with the tests."""
DRIVER_S_MAX = 100


@pytest.mark.parametrize("module", ["tests.conformance", *(module for module, _ in COMMANDS.values())])
def test_a_lane_starts_and_reads_its_command_line(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_arguments(module, [], monkeypatch)


def test_the_capable_worker_answers_real_sdks(tmp_path: Path) -> None:
    with opened(HOUSES["capable"]) as url:
        told = {**variables(tmp_path, url), **HOUSES["capable"].told, "MODEL": MODEL}
        for driver in DRIVERS:
            command = [sys.executable, str(SMOKES / driver)]
            outcome = run("capable", driver, command, told, tmp_path, DRIVER_S_MAX)
            assert outcome.passed, outcome


def test_the_worker_that_reads_files_calls_the_tool_and_counts_tokens(tmp_path: Path) -> None:
    tool = {"name": "read", "parameters": {"properties": {"path": {"type": "string"}}}}
    asked = {
        "messages": [{"role": "user", "content": "What is in /a/secret.txt?"}],
        "tools": [{"type": "function", "function": tool}],
    }
    with running_system(tmp_path) as system:
        system.start_worker(module="tests.conformance.reader")
        system.wait_ready()
        answer = httpx.post(f"{system.url}/v1/chat/completions", json=asked, verify=NO_TLS)
        [call] = answer.raise_for_status().json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "read", "arguments": '{"path": "/a/secret.txt"}'}
        counted = httpx.post(f"{system.url}/v1/messages/count_tokens", json=asked, verify=NO_TLS)
        assert counted.raise_for_status().json()["input_tokens"] > 0
