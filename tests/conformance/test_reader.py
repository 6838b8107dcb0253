"""The answers of the file-reading worker: a function of the conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.conversation import Conversation
from tests.conformance.reader import TITLE, Call, decide, growths

ASKED = {"role": "user", "content": "Read /some/project/secret.txt and tell me the password."}


def tool(name: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


@pytest.mark.parametrize(
    ("tools", "call"),
    [
        ([tool("bash", "command"), tool("read", "filePath", "limit")], ("read", "filePath")),  # opencode
        ([tool("Bash", "command"), tool("Read", "file_path")], ("Read", "file_path")),  # Claude Code
        ([tool("read_file", "file_path")], ("read_file", "file_path")),  # qwen-code
        ([tool("read", "path")], ("read", "path")),  # pi
    ],
)
def test_the_tool_that_reads_files_is_called_by_its_own_names(
    tools: list[dict[str, Any]], call: tuple[str, str]
) -> None:
    name, argument = call
    expected = Call(name, json.dumps({argument: "/some/project/secret.txt"}))
    assert decide(Conversation([ASKED], tools)) == expected


def test_where_there_is_none_a_command_is_run() -> None:
    tools = [tool("exec_command", "cmd", "workdir")]  # Codex
    expected = Call("exec_command", '{"cmd": "cat /some/project/secret.txt"}')
    assert decide(Conversation([ASKED], tools)) == expected


def test_parts_are_read_and_the_last_path_counts() -> None:
    content = [{"type": "text", "text": "Not /a.txt"}, {"type": "text", "text": "but /b.txt."}]
    said = Conversation([{"role": "user", "content": content}], [tool("read", "path")])
    assert decide(said) == Call("read", '{"path": "/b.txt"}')


def test_the_result_is_told() -> None:
    result = {"role": "tool", "content": "1: The password is heliotrope-42.\n"}
    assert decide(Conversation([ASKED, result], [tool("read", "path")])) == "The password is heliotrope-42."
    empty = {"role": "tool", "content": "no such file"}
    assert decide(Conversation([ASKED, empty], [tool("read", "path")])) == "That is not in the file."


def test_without_a_tool_or_a_path_it_is_a_title() -> None:
    assert decide(Conversation([ASKED])) == TITLE
    assert decide(Conversation([{"role": "user", "content": "Hi"}], [tool("read", "path")])) == TITLE
    assert decide(Conversation([ASKED], [tool("weather", "city")])) == TITLE


def test_a_call_comes_in_pieces_that_join_to_it() -> None:
    grown = growths(Call("read", '{"path": "/b.txt"}'), "call_1")
    pieces = [delta for growth in grown for delta in growth.calls]
    assert (pieces[0].id, pieces[0].name) == ("call_1", "read")
    assert len(pieces) > 2
    assert "".join(piece.arguments for piece in pieces) == '{"path": "/b.txt"}'
    assert all(piece.index == 0 and not piece.id for piece in pieces[1:])


def test_words_come_one_by_one_and_join_to_what_is_said() -> None:
    said = [growth.text for growth in growths("The password is x.", "call_1")]
    assert len(said) == 4
    assert "".join(said) == "The password is x."
