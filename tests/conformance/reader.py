"""A worker that does ten steps like a capable model, each by a tool of the agent, and logs what reached it.

Agents from npm run on it, because the small models of the tests are too weak for them."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from protocol import lifeline
from protocol.common import logs
from protocol.conversation import Conversation, unpack
from protocol.errors import too_long
from protocol.messages import Generate
from protocol.settings.worker import WorkerSettings
from protocol.types import CallDelta, Capabilities
from tests.scripted_worker.engine import END, FakeEngine
from tests.scripted_worker.script import Script
from tests.scripted_worker.text import FakePipeline, FakePrepared
from worker.gateway.service import Service
from worker.interfaces import Model, Progress
from worker.values import NEVER, CancelToken, EngineRequest, ModelInfo, OutputDelta, SamplingParams, Tokenized

NAME = "reader"
CONTEXT_LENGTH = 131_072
"""Words; agents' first prompts have ten thousand."""
TITLE = "Steps in a folder"
PIECE = 7
"""Characters of a call's arguments in each delta."""

KINDS = {
    "run": ("bash", "exec_command", "run_shell_command", "exec", "terminal"),
    "read": ("read", "read_file"),
    "write": ("write", "write_file", "apply_patch"),
    "search": ("get_tide", "grep", "grep_search"),
    "find": ("toolsearch", "tool_search"),
    "delegate": ("agent", "task", "spawn_agent"),
    "wait": ("wait_agent",),
}
"""Tools of agents by kind, without namespace and in lower case."""
SAME = {"cmd": "command", "filePath": "path", "file_path": "path", "message": "prompt"}
"""Names of the same argument in other agents' schemas."""
PATCH = "*** Begin Patch\n*** Add File: {path}\n+{content}\n*** End Patch\n"

_TASK = re.compile(r"Do (ten steps|one step) in (/[\w./-]+\w)")
_PASSWORD = re.compile(r"password is ([a-z]+-\d+)")

Step = tuple[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Any


def decide(conversation: Conversation) -> Call | str:
    """Return the next step of the task that was given last, or the answer after its last step."""
    messages = conversation.messages or []
    tasks = [(at, _TASK.findall(text_of(m))) for at, m in enumerate(messages) if m["role"] != "tool"]
    at, found = next(((at, found) for at, found in reversed(tasks) if found), (0, None))
    if not found or not conversation.tools:
        return TITLE
    results = [text_of(message) for message in messages[at:] if message["role"] == "tool"]
    known = _PASSWORD.search("\n".join(results))
    (amount, place), password = found[-1], known[1] if known else "unknown"
    steps = _steps(place, password, only_one=amount == "one step")
    return _call(conversation.tools, *steps[len(results)]) if len(results) < len(steps) else password


def _steps(place: str, password: str, *, only_one: bool) -> Sequence[Step]:
    secret, one, two, part = (f"{place}/{name}.txt" for name in ("secret", "one", "two", "part"))
    read = _step("read", f"cat {secret}", path=secret)
    if only_one:
        return read, _written(part, password)
    task = {"prompt": f"Do one step in {place}.", "subagent_type": "general", "task_name": "part"}
    return (
        _step("run", f"ls {place}"),
        read,
        _written(one, password),
        _step("read", f"cat {one}", path=one),
        _step("delegate", f"echo {password} > {part}", **task),
        _step("wait", f"until test -s {part}; do sleep 0.2; done"),
        _step("find", "true", query="select:WebFetch,mcp__tide__get_tide"),
        _step("search", f"grep -n a {one}", pattern="[a-z]+", path=place, port="Brest"),
        _written(two, password),
        _step("run", f"cat {one} {two} {part} > {place}/done.txt"),
    )


def _step(kind: str, command: str, **values: str) -> Step:
    return kind, {"command": command, "description": "A step", **values}


def _written(path: str, content: str) -> Step:
    return _step("write", f"echo {content} > {path}", path=path, content=content)


def _call(tools: Sequence[Mapping[str, Any]], kind: str, values: Mapping[str, str]) -> Call:
    """Return a call of a tool of this kind, or else of one that runs commands."""
    functions = {re.split("__|[.]", tool["function"]["name"])[-1].lower(): tool["function"] for tool in tools}
    name = next(name for name in (*KINDS[kind], *KINDS["run"]) if name in functions)
    script = f"text(await tools.exec_command({json.dumps({'cmd': values['command']})}))"
    free = PATCH.format_map(values) if name == "apply_patch" else script
    schema = functions[name].get("parameters") or {}
    wanted = {word: SAME.get(word, word) for word in schema.get("required") or schema.get("properties") or ()}
    told = {"input": free, **values}
    return Call(functions[name]["name"], {word: told[same] for word, same in wanted.items() if same in told})


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def growths(done: Call | str, id: str) -> list[OutputDelta]:
    """Return the deltas of an answer, one for each token."""
    if isinstance(done, str):
        return [OutputDelta(word) for word in re.findall(r"\s*\S+", done)]
    arguments = json.dumps(done.arguments)
    pieces = [arguments[at : at + PIECE] for at in range(0, len(arguments), PIECE)]
    begun = CallDelta(index=0, id=id, name=done.name)
    return [
        OutputDelta(is_content=False, calls=(delta,))
        for delta in (begun, *(CallDelta(index=0, arguments=piece) for piece in pieces))
    ]


@dataclass(frozen=True, slots=True)
class Planned(FakePrepared):
    growths: tuple[OutputDelta, ...] = ()


@dataclass(slots=True)
class Preparer:
    scripts: MutableMapping[str, Script]
    context_length: int

    def prepare(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> EngineRequest:
        conversation = _whole(unpack(request))
        print(json.dumps({"tools": conversation.tools, "messages": conversation.messages}), flush=True)
        tokens = _tokens(conversation)
        if len(tokens) >= self.context_length:
            raise too_long(self.context_length, len(tokens), "messages", by_memory=False)
        steps = growths(decide(conversation), f"call_{request.id.partition('~')[0]}")
        return Planned(
            id=request.id,
            tokens=tokens,
            sampling=SamplingParams(),
            stop=(),
            max_tokens=len(steps) + 1,
            end_tokens=frozenset((END,)),
            resume=tuple(request.resume),
            script=self.scripts.setdefault(request.id, Script(tokens=len(steps))),
            growths=tuple(steps),
        )

    def tokenize(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> Tokenized:
        return Tokenized(request.id, len(_tokens(unpack(request))))


def _whole(conversation: Conversation) -> Conversation:
    """Return a conversation with its late tools among the others."""
    tools = [*(conversation.tools or ()), *conversation.late_tools]
    return replace(conversation, tools=tools or None, late_tools=())


def _tokens(conversation: Conversation) -> tuple[int, ...]:
    """Return a token for each word of the conversation and its tools."""
    said = json.dumps([conversation.tools, conversation.messages], ensure_ascii=False)
    return tuple(1 + len(word) for word in said.split())


@dataclass(slots=True)
class Pipeline(FakePipeline):
    """An output processor that returns the next delta for each token."""

    growths: tuple[OutputDelta, ...] = ()
    pushed: int = 0

    def push(self, token: int) -> OutputDelta:
        growth = self.growths[self.pushed]
        self.pushed += 1
        self.has_called = self.pushed == len(self.growths) and bool(growth.calls)
        return growth


def open_output_processor(request: EngineRequest) -> Pipeline:
    assert isinstance(request, Planned)
    return Pipeline(request.script, growths=request.growths)


@dataclass(slots=True)
class Loader:
    name: str = NAME

    def load(self, progress: Progress) -> Model:
        scripts: MutableMapping[str, Script] = WeakValueDictionary()
        return Model(
            info=ModelInfo(self.name, CONTEXT_LENGTH, 0, Capabilities(system_in_place=True)),
            engine=FakeEngine(scripts, step_ms=0.0),
            open_preparer=lambda context_length: Preparer(scripts, context_length),
            open_output_processor=open_output_processor,
        )


def main() -> int:
    logs.setup("reader", "text", "info")
    lifeline.follow_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint")
    parser.add_argument("--name", default=NAME)
    told = parser.parse_args()
    return Service(Loader(told.name), WorkerSettings(endpoint=told.endpoint)).run()


if __name__ == "__main__":
    raise SystemExit(main())
