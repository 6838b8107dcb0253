"""MCP servers' tools: read from the user's file, called by a model with the user's consent, bounded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.console import chat_repl, mcp
from deploy.console.chat_repl import ChatRepl
from deploy.console.mcp import McpError, ServerCommand, Toolbox, opened, read_servers
from tests.deploy.console import mcp_played
from tests.deploy.console.test_chat_repl import Played, chatting, converse

ARGUMENTS = [str(Path(mcp_played.__file__))]


def command(*behaviour: str, name: str = "fs") -> ServerCommand:
    return ServerCommand(name, sys.executable, ("-S", *ARGUMENTS, *behaviour))


@pytest.fixture(scope="module")
def tools() -> Iterator[Toolbox]:
    with opened([command()]) as found:
        yield found


# --- the file ----------------------------------------------------------------------------------------


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_servers_are_read_from_the_usual_format(tmp_path: Path) -> None:
    entries = {
        "fs": {"command": "npx", "args": ["-y", "x"], "env": {"A": "1"}, "cwd": "/"},
        "b": {"command": "b"},
    }
    found = read_servers(write(tmp_path / "mcp.json", {"mcpServers": entries}))
    assert found == [ServerCommand("fs", "npx", ("-y", "x"), {"A": "1"}, "/"), ServerCommand("b", "b")]


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"mcpServers": {"a": {"url": "http://x"}}}, "a: only servers with a command"),
        ({"mcpServers": {str(n): {"command": "b"} for n in range(mcp.SERVERS_MAX + 1)}}, "at most"),
        ({"servers": {}}, "must be JSON like"),
        ({"mcpServers": {"a": []}}, "a: it has no command"),
        ({"mcpServers": {"a": {"command": "b", "args": [1]}}}, "a: args must be a list, env an object"),
        ({"mcpServers": {"a": {"command": "b", "env": ["x"]}}}, "a: args must be a list, env an object"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path: Path, document: object, why: str) -> None:
    with pytest.raises(McpError, match=why):
        read_servers(write(tmp_path / "mcp.json", document))
    with pytest.raises(McpError, match="cannot be read: No such file"):
        read_servers(tmp_path / "none.json")


# --- servers -----------------------------------------------------------------------------------------


def test_the_tools_of_all_pages_are_offered_under_their_servers_name(tools: Toolbox) -> None:
    functions = [definition["function"] for definition in tools.definitions()]
    assert [function["name"] for function in functions][:2] == ["fs__echo", "fs__fail"]
    assert functions[-1] == {"name": "fs__with_space_", "description": "", "parameters": {"type": "object"}}
    assert len(tools) == len(mcp_played.TOOLS)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("fs__echo", '{"text": "hi"}', '{"text": "hi"}\n[image that cannot be shown as text]'),
        ("fs__fail", "{}", "Error: no such file"),
        ("fs__with_space_", "{}", "Error: fs: not today"),
        ("fs__none", "{}", "Error: there is no tool 'fs__none'."),
        ("fs__echo", "{", "Error: the arguments are not a JSON object."),
        ("fs__long", "{}", "x" * mcp.RESULT_CHARACTERS_MAX + "\n[cut off: 200000 characters]"),
    ],
)
def test_each_call_has_a_result_for_the_model(tools: Toolbox, name: str, arguments: str, result: str) -> None:
    assert tools.call(name, arguments) == result


def test_a_call_is_bounded_in_time_and_its_server_ends_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "CALL_S_MAX", 0.05)
    monkeypatch.setattr(mcp, "END_S_MAX", 0.05)
    with opened([command()]) as tools:
        assert "not been answered in time" in tools.call("fs__hang", "{}")


def test_servers_that_cannot_be_used_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(McpError, match="none: no-such-program: No such file"),
        opened([ServerCommand("none", "no-such-program")]),
    ):
        pass
    monkeypatch.setattr(mcp, "START_S_MAX", 0.05)
    monkeypatch.setattr(mcp, "END_S_MAX", 0.05)
    with pytest.raises(McpError, match="initialize has not been answered"), opened([command("silent")]):
        pass


def test_names_are_shortened_and_told_apart() -> None:
    taken: set[str] = set()
    for _ in range(3):
        taken.add(mcp._offered_name("s", "t" * 100, taken))
    assert {len(name) for name in taken} == {64}
    assert {name[-4:] for name in taken} == {"tttt", "tt_2", "tt_3"}


def test_a_server_that_has_ended_is_said_to_the_model() -> None:
    with opened([command("ends")]) as tools:
        for _ in range(2):
            assert tools.call("fs__echo", "{}") == "Error: fs: the server has ended"


# --- the chat ----------------------------------------------------------------------------------------


@pytest.fixture
def played() -> Played:
    return Played()


@pytest.fixture
def talking(played: Played, tools: Toolbox) -> Iterator[ChatRepl]:
    with chatting(played, tools=tools) as talking:
        yield talking


def will_call(played: Played, *calls: tuple[str, str]) -> None:
    deltas: list[dict[str, Any]] = []
    for index, (name, arguments) in enumerate(calls):
        begun = {"index": index, "id": f"call-{index}", "function": {"name": name, "arguments": ""}}
        rest = [{"index": index, "function": {"arguments": half}} for half in (arguments[:3], arguments[3:])]
        deltas += [{"tool_calls": [part]} for part in (begun, *rest)]
    played.will_stream(deltas, "tool_calls")


def results(played: Played) -> Sequence[str]:
    return [each["content"] for each in played.asked[-1]["messages"] if each["role"] == "tool"]


def test_a_tool_is_called_with_consent_which_is_asked_for_once(talking: ChatRepl, played: Played) -> None:
    asked: list[str] = []

    def allow(name: str, arguments: str) -> bool:
        asked.append(name)
        return name == "fs__echo"

    talking.allow = allow
    will_call(played, ("fs__echo", '{"text": 1}'), ("fs__fail", "{}"))
    will_call(played, ("fs__echo", '{"text": 2}'))
    played.will_say("Done.")
    shown = converse(talking, "Do it")
    assert "Done." in shown
    assert "▸ fs__echo" in shown
    assert asked == ["fs__echo", "fs__fail"]
    assert [result.partition("\n")[0] for result in results(played)] == [
        '{"text": 1}',
        "Error: the user did not allow this call.",
        '{"text": 2}',
    ]
    called = played.asked[1]["messages"][1]
    assert (called["role"], called["content"], len(called["tool_calls"])) == ("assistant", None, 2)
    assert "fs__echo" in talking.conversation.transcript()


def test_call_rounds_are_bounded(talking: ChatRepl, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_repl, "CALL_ROUNDS_MAX", 3)
    talking.allow = lambda name, arguments: True
    for _ in range(3):
        will_call(played, ("fs__echo", "{}"))
    assert "stopped after 3 rounds" in converse(talking, "Do it")


def test_interrupted_call_has_a_result_and_retry_begins_before_it(talking: ChatRepl, played: Played) -> None:
    def interrupt(name: str, arguments: str) -> bool:
        raise KeyboardInterrupt

    talking.allow = interrupt
    will_call(played, ("fs__echo", "{}"), ("fs__fail", "{}"))
    played.will_say("Well.")
    converse(talking, "Do it", "Why?")
    assert results(played) == ["Error: the user has interrupted this call."] * 2
    played.will_say("Again.")
    converse(talking, "/retry")
    assert played.asked[-1]["messages"][-1]["content"] == "Why?"
