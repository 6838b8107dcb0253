"""Tools of MCP servers (modelcontextprotocol.io), for the chat: started as processes, asked over their stdio.

Each message is a line of JSON-RPC. Of the protocol only the part for tools is implemented, without the `mcp`
package, which needs a web server and cryptography. Threads read and write each server's lines, so that every
wait has a bound. Tools are offered by this client alone: no server of models knows them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.model_folder import expand_user
from protocol.text_files import EncodingError, without_mark

VERSION = "2025-06-18"
"""Version of the protocol that is offered; servers may answer with another one."""

START_S_MAX = 20.0
CALL_S_MAX = 120.0
END_S_MAX = 2.0
LINE_BYTES_MAX = 8 * 2**20
RESULT_CHARACTERS_MAX = 100_000
"""Maximum length of a result that is sent to the model; the rest is cut off, and the model is told so."""
SERVERS_MAX = 16
TOOLS_MAX = 256
FILE_BYTES_MAX = 2**20
_NAME_CHARACTERS_MAX = 64
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")


class McpError(Exception):
    """A server cannot be used; the message is for the user."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started. `env`: added to this process's environment."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `name`: as offered to the model, with its server's name. `own_name`: as the server knows it."""

    name: str
    own_name: str
    server: McpServer
    description: str
    schema: Mapping[str, Any]

    def definition(self) -> dict[str, Any]:
        """Return the entry of `tools` in a request."""
        described = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": described}


def read_servers(path: Path) -> list[ServerCommand]:
    """Return the servers of a file in the usual format, `{"mcpServers": {NAME: {"command": …}}}`.

    Raises `McpError` with what is wrong.
    """
    try:
        with expand_user(path).open("rb") as file:
            document = json.loads(without_mark(file.read(FILE_BYTES_MAX + 1)))
        entries = dict(document["mcpServers"])
    except OSError as error:
        raise McpError(f"{path} cannot be read: {error.strerror}") from None
    except EncodingError as error:
        raise McpError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise McpError(f'{path} must be JSON like {{"mcpServers": {{"NAME": {{"command": …}}}}}}') from None
    if len(entries) > SERVERS_MAX:
        raise McpError(f"{path} has {len(entries)} servers, at most {SERVERS_MAX} are possible")
    return [_command(path, name, entry) for name, entry in entries.items()]


def _command(path: Path, name: str, entry: Any) -> ServerCommand:
    fields = entry if isinstance(entry, dict) else {}
    command, args, env = fields.get("command"), fields.get("args") or [], fields.get("env") or {}
    if not isinstance(command, str):
        why = "only servers with a command are supported" if "url" in fields else "it has no command"
        raise McpError(f"{path}: {name}: {why}")
    texts = [*args, *env, *env.values()] if isinstance(args, list) and isinstance(env, dict) else [None]
    if not all(isinstance(text, str) for text in (*texts, fields.get("cwd") or "")):
        raise McpError(f"{path}: {name}: args must be a list, env an object, both of strings")
    return ServerCommand(name, command, tuple(args), env, fields.get("cwd"))


class McpServer:
    """A running server."""

    def __init__(self, started_by: ServerCommand) -> None:
        """Start the process. Raises `McpError`."""
        self.name = started_by.name
        self._ids = itertools.count(1)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            self._process = subprocess.Popen(
                [started_by.command, *started_by.args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **started_by.env},
                cwd=started_by.cwd,
                start_new_session=True,  # Ctrl-C ends an answer, not the servers
            )
        except OSError as error:
            raise McpError(f"{self.name}: {started_by.command}: {error.strerror}") from None
        self._threads = [
            threading.Thread(target=work, name=f"mcp-{self.name}", daemon=True)
            for work in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def open(self) -> list[dict[str, Any]]:
        """Agree on the protocol; return the server's tools. Raises `McpError`."""
        us = {"name": "roundhouse", "version": "1"}
        asked = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": us}
        until = time.monotonic() + START_S_MAX
        self._ask("initialize", asked, until)
        self._send({"method": "notifications/initialized"})
        found: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        while len(found) <= TOOLS_MAX:
            page = self._ask("tools/list", cursor, until)
            found += [tool for tool in page.get("tools") or () if isinstance(tool.get("name"), str)]
            if not page.get("nextCursor"):
                break
            cursor = {"cursor": page["nextCursor"]}
        return found[:TOOLS_MAX]

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a call's result. Raises `McpError`."""
        asked = {"name": tool, "arguments": arguments}
        result = self._ask("tools/call", asked, time.monotonic() + CALL_S_MAX)
        parts = [_text_of(part) for part in result.get("content") or ()]
        text = "\n".join(parts) or json.dumps(result.get("structuredContent"), ensure_ascii=False)
        text = f"Error: {text}" if result.get("isError") else text
        if len(text) <= RESULT_CHARACTERS_MAX:
            return text
        return f"{text[:RESULT_CHARACTERS_MAX]}\n[cut off: {len(text)} characters]"

    def close(self) -> None:
        """End the process: by closing its stdin, or else by signals."""
        self._unsent.put(None)
        for end in (self._process.terminate, self._process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S_MAX)
                break
            end()
        self._process.wait()
        for thread in self._threads:
            thread.join(END_S_MAX)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            while line := lines.readline(LINE_BYTES_MAX):
                self._lines.put(line)
        self._lines.put(None)

    def _write(self) -> None:
        assert self._process.stdin is not None
        # A server that has ended is noticed by its reader.
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            while (line := self._unsent.get()) is not None:
                stdin.write(line)
                stdin.flush()

    def _ask(self, method: str, params: Mapping[str, Any], until: float) -> dict[str, Any]:
        """Send a request; return its result. What the server asks meanwhile is answered."""
        id = next(self._ids)
        self._send({"id": id, "method": method, "params": params})
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise McpError(f"{self.name}: {method} has not been answered in time") from None
            if line is None:
                self._lines.put(None)  # for the next request
                raise McpError(f"{self.name}: the server has ended")
            said = _message(line)
            if "method" in said:
                self._answer(said)
            elif said.get("id") == id:
                return self._result(said)

    def _result(self, said: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(said.get("result"), dict):
            return dict(said["result"])
        error = said.get("error")
        raise McpError(f"{self.name}: {error.get('message') if isinstance(error, dict) else 'no result'}")

    def _answer(self, said: Mapping[str, Any]) -> None:
        """Answer a request of the server; notifications have no id."""
        if "id" not in said:
            return
        refused = {"error": {"code": -32601, "message": "not supported by this client"}}
        self._send({"id": said["id"], **({"result": {}} if said["method"] == "ping" else refused)})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._unsent.put(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


def _message(line: bytes) -> dict[str, Any]:
    """Return a message; an empty one for a line that is none, as some servers print."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else None
    return f"[{kind or 'content'} that cannot be shown as text]"


class Toolbox:
    """The tools of all servers, by the names that the model is offered."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def __len__(self) -> int:
        return len(self._tools)

    def definitions(self) -> list[dict[str, Any]]:
        return [tool.definition() for tool in self._tools.values()]

    def call(self, name: str, arguments: str) -> str:
        """Return the result of a call, or why there is none, for the model."""
        if (tool := self._tools.get(name)) is None:
            return f"Error: there is no tool {name!r}."
        try:
            given = json.loads(arguments or "{}")
        except ValueError:
            given = None
        if not isinstance(given, dict):
            return "Error: the arguments are not a JSON object."
        try:
            return tool.server.call(tool.own_name, given)
        except McpError as error:
            return f"Error: {error}"


@contextlib.contextmanager
def opened(commands: Sequence[ServerCommand]) -> Iterator[Toolbox]:
    """Run the servers, and provide their tools. Raises `McpError` if one cannot be used."""
    with contextlib.ExitStack() as running:
        tools: list[Tool] = []
        names: set[str] = set()
        for command in commands:
            server = McpServer(command)
            running.callback(server.close)
            for told in server.open():
                name = _offered_name(server.name, told["name"], names)
                names.add(name)
                schema = told.get("inputSchema")
                parameters = schema if isinstance(schema, dict) else {"type": "object"}
                described = str(told.get("description") or "")
                tools.append(Tool(name, told["name"], server, described, parameters))
        yield Toolbox(tools[:TOOLS_MAX])


def _offered_name(server: str, tool: str, taken: set[str]) -> str:
    """Return a name that models and APIs accept, and that no other tool has."""
    name = _NOT_IN_A_NAME.sub("_", f"{server}__{tool}")[:_NAME_CHARACTERS_MAX]
    numbers = itertools.count(2)
    while name in taken:
        ending = f"_{next(numbers)}"
        name = name[: _NAME_CHARACTERS_MAX - len(ending)] + ending
    return name
