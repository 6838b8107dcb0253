"""An agent's conversation of random texts: a system prompt, tools, then repeated calls and results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.models import random_text

Message = dict[str, Any]


class Texts:
    """Random texts from a first seed on, no two with a common prefix."""

    def __init__(self, folder: Path, first: int) -> None:
        self._folder = folder
        self._seeds = itertools.count(first)

    def __call__(self, tokens: int) -> str:
        return random_text(self._folder, tokens, next(self._seeds))


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": about} for key, about in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


TOOLS = [
    _tool("read_file", "Read a text file of the project.", path="Where it is, from the root."),
    _tool("write_file", "Write a text file anew.", path="Where it shall be.", text="All that it shall hold."),
    _tool("list_folder", "List the files of a folder.", path="The folder, from the root."),
    _tool("search", "Find lines in all files.", pattern="A regular expression.", path="The folder."),
    _tool("run_command", "Run a command and return what it prints.", command="The line for the shell."),
    _tool("fetch_page", "Fetch a page of the manual as text.", address="Its address."),
]


def opening(system: str, question: str) -> list[Message]:
    """Return the messages of the first turn."""
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def grown(messages: Sequence[Message], answer: str, argument: str, result: str) -> list[Message]:
    """Return the messages of the next turn: the assistant's `answer` with a tool call, and the tool's
    `result`."""
    id = f"call_{len(messages)}"
    function = {"name": "run_command", "arguments": json.dumps({"command": argument})}
    call = {"id": id, "type": "function", "function": function}
    said = {"role": "assistant", "content": answer, "tool_calls": [call]}
    return [*messages, said, {"role": "tool", "tool_call_id": id, "content": result}]


def estranged(messages: Sequence[Message], words: str) -> list[Message]:
    """Return `messages` with `words` put first: about as long, and without a prefix in common with the
    original."""
    first = messages[0]
    return [{**first, "content": f"{words} {first['content']}"}, *messages[1:]]
