"""The answers of the file-reading worker: a function of the conversation."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.conversation import Conversation
from tests.conformance.reader import TITLE, Call, decide, growths

ASKED = {"role": "user", "content": "Read /some/project/secret.txt and tell me the password."}


def tool(name: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def result(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content}


READ = tool("read", "path")
PARTS = [{"type": "text", "text": "Not /a.txt"}, {"type": "text", "text": "but /b.txt."}]
PATH = "/some/project/secret.txt"


@pytest.mark.parametrize(
    ("said", "tools", "answer"),
    [
        (
            [ASKED],
            [tool("bash", "command"), tool("read", "filePath", "limit")],
            Call("read", f'{{"filePath": "{PATH}"}}'),
        ),
        (
            [ASKED],
            [tool("Bash", "command"), tool("Read", "file_path")],
            Call("Read", f'{{"file_path": "{PATH}"}}'),
        ),
        ([ASKED], [tool("read_file", "file_path")], Call("read_file", f'{{"file_path": "{PATH}"}}')),
        ([ASKED], [READ], Call("read", f'{{"path": "{PATH}"}}')),
        (
            [ASKED],
            [tool("exec_command", "cmd", "workdir")],
            Call("exec_command", f'{{"cmd": "cat {PATH}"}}'),
        ),
        ([{"role": "user", "content": PARTS}], [READ], Call("read", '{"path": "/b.txt"}')),
        (
            [ASKED, result("1: The password is heliotrope-42.\n")],
            [READ],
            "The password is heliotrope-42.",
        ),
        ([ASKED, result("no such file")], [READ], "That is not in the file."),
        ([ASKED], [], TITLE),
        ([{"role": "user", "content": "Hi"}], [READ], TITLE),
        ([ASKED], [tool("weather", "city")], TITLE),
    ],
    ids=["opencode", "claude", "qwen", "pi", "codex", "parts", "told", "none", "no tool", "no path", "other"],
)  # fmt: skip
def test_the_tool_that_reads_files_is_called_and_its_result_told(
    said: list[dict[str, Any]], tools: list[dict[str, Any]], answer: Call | str
) -> None:
    assert decide(Conversation(said, tools)) == answer


def test_a_call_and_words_come_in_pieces_that_join_to_them() -> None:
    grown = growths(Call("read", '{"path": "/b.txt"}'), "call_1")
    pieces = [delta for growth in grown for delta in growth.calls]
    assert (pieces[0].id, pieces[0].name) == ("call_1", "read")
    assert len(pieces) > 2
    assert "".join(piece.arguments for piece in pieces) == '{"path": "/b.txt"}'
    assert all(piece.index == 0 and not piece.id for piece in pieces[1:])
    words = [growth.text for growth in growths("The password is x.", "call_1")]
    assert (len(words), "".join(words)) == (4, "The password is x.")
