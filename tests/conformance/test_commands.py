"""`make conformance`: its programs start, and the agents' worker answers rightly through a real gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import check_arguments
from tests.conformance.__main__ import COMMANDS
from tests.system import chat_body, running_system


@pytest.mark.parametrize("module", ["tests.conformance", *(module for module, _ in COMMANDS.values())])
def test_a_lane_starts_and_reads_its_command_line(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_arguments(module, [], monkeypatch)


def test_the_worker_that_does_steps_calls_the_tool_and_counts_tokens(tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"filePath": {"type": "string"}}, "required": ["filePath"]}
    tool = {"type": "function", "function": {"name": "read", "description": "", "parameters": parameters}}
    body = chat_body("Do one step in /a/b.", tools=[tool])
    with running_system(tmp_path) as system:
        system.start_worker(module="tests.conformance.reader")
        system.wait_ready()
        chat = system.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        [call] = chat["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "read", "arguments": '{"filePath": "/a/b/secret.txt"}'}
        counted = system.http.post("/v1/messages/count_tokens", json=body).raise_for_status()
        assert counted.json()["input_tokens"] > 0
