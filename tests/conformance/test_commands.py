"""`make conformance`: its programs start, and its workers answer rightly through a real gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.commands import check_arguments
from tests.conformance.__main__ import COMMANDS
from tests.conformance.servers import HOUSES, opened
from tests.system import NO_TLS, running_system

ANSWER_S_MAX = 100


@pytest.mark.parametrize("module", ["tests.conformance", *(module for module, _ in COMMANDS.values())])
def test_a_lane_starts_and_reads_its_command_line(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_arguments(module, [], monkeypatch)


def asked(text: str, tool: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    function = {"name": tool, "description": "", "parameters": parameters}
    return {
        "messages": [{"role": "user", "content": text}],
        "tools": [{"type": "function", "function": function}],
    }


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}/v1/{path}", json=body, verify=NO_TLS, timeout=ANSWER_S_MAX)
    return answer.raise_for_status().json()


def test_the_capable_worker_calls_the_tool_and_tells_its_result() -> None:
    body = asked("What is the weather in Rome?", "get_weather", "city")
    with opened(HOUSES["capable"]) as url:
        called = post(url, "chat/completions", body)["choices"][0]
        [call] = called["message"]["tool_calls"]
        assert (called["finish_reason"], call["function"]["name"]) == ("tool_calls", "get_weather")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "Sleet."}
        body["messages"] += [called["message"], result]
        assert "Sleet." in post(url, "chat/completions", body)["choices"][0]["message"]["content"]


def test_the_worker_that_reads_files_calls_the_tool_and_counts_tokens(tmp_path: Path) -> None:
    body = asked("What is in /a/secret.txt?", "read", "path")
    with running_system(tmp_path) as system:
        system.start_worker(module="tests.conformance.reader")
        system.wait_ready()
        [call] = post(system.url, "chat/completions", body)["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "read", "arguments": '{"path": "/a/secret.txt"}'}
        assert post(system.url, "messages/count_tokens", body)["input_tokens"] > 0
