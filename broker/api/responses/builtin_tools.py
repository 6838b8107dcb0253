"""Built-in tools that the client runs: `local_shell`, `shell`, `apply_patch`, and its own tool search.

Each is offered as a function of the same name. A call of it is returned as an item of the tool's own type,
with the arguments as one object. They are not enforced: what the model wrote is delivered as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from broker.dialects.body import convert
from broker.dialects.tools import FunctionTool

SEARCH = "tool_search"
"""Name of the function that stands for a client's tool search."""


class CallItem(NamedTuple):
    """Item of a call. `field`: the one with the arguments. `beside`: further fields. `filled`: what the field
    has besides the arguments, and without any."""

    prefix: str
    field: str
    beside: Mapping[str, Any] = {}
    filled: Mapping[str, Any] = {}


CALL_ITEMS: Mapping[str, CallItem] = {
    "apply_patch": CallItem("apc", "operation"),
    "local_shell": CallItem("lsh", "action", filled={"type": "exec", "env": {}}),
    "shell": CallItem("sh", "action"),
    SEARCH: CallItem("tsc", "arguments", {"execution": "client"}),
}
"""Items of calls, by tool. Their type is that of the tool with `_call` behind it."""


class _Skill(Struct):
    name: str
    description: str
    path: str


class _Environment(Struct):
    """Where commands run. Types other than `local` are containers of OpenAI's."""

    type: str
    skills: list[_Skill] = []


class _Builtin(Struct):
    """Fields of all these tools. `execution`: there is no search on the server, which offers all tools."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    execution: Literal["server", "client"] = "server"
    environment: _Environment | None = None


def function_of(kind: str, tool: Mapping[str, Any], place: str) -> FunctionTool | None:
    """Return the function that is offered for a built-in tool; None for one that the client does not run.
    Raises `RequestError`."""
    if kind not in CALL_ITEMS:
        return None
    read = convert(tool, _Builtin, place)
    if kind == SEARCH:
        parameters = read.parameters or {"type": "object", "properties": {}}
        asked = FunctionTool(SEARCH, read.description or "Search for further tools.", parameters)
        return asked if read.execution == "client" else None
    environment = read.environment or _Environment("local")
    if environment.type != "local":
        return None
    description, fields, required = _SCHEMAS[kind]
    parameters = {"type": "object", "properties": fields, "required": required}
    return FunctionTool(kind, "\n".join([description, *_listed(environment.skills)]), parameters)


def _listed(skills: Iterable[_Skill]) -> Iterable[str]:
    return (f"Skill {skill.name} in {skill.path}: {skill.description}" for skill in skills)


def _field(kind: str, description: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": description, **more}


_TEXT = {"type": "string"}
_TIMEOUT = {"timeout_ms": _field("integer", "Timeout in milliseconds.")}
_SCHEMAS: Mapping[str, tuple[str, dict[str, Any], list[str]]] = {
    "apply_patch": (
        "Create, update or delete a file.",
        {
            "type": _field("string", "What to do.", enum=["create_file", "update_file", "delete_file"]),
            "path": _field("string", "Path of the file."),
            "diff": _field(
                "string",
                "The change, not for delete_file: lines that begin with a space, '-' or '+', below '@@' and "
                "a line near them. For create_file, all lines begin with '+'.",
            ),
        },
        ["type", "path"],
    ),
    "local_shell": (
        "Run a command on the user's computer.",
        {
            "command": _field("array", "The program and its arguments.", items=_TEXT),
            "env": _field("object", "Environment variables.", additionalProperties=_TEXT),
            "working_directory": _field("string", "Where to run it."),
            "user": _field("string", "The user to run it as."),
            **_TIMEOUT,
        },
        ["command"],
    ),
    "shell": (
        "Run commands in a shell.",
        {
            "commands": _field("array", "The commands.", items=_TEXT),
            "max_output_length": _field("integer", "Number of characters of output to return per command."),
            **_TIMEOUT,
        },
        ["commands"],
    ),
}
"""Description, fields and required fields, by tool."""
