"""A worker that reads a file as a good model would: it calls the tool for it, and says what it was told.

    python -m tests.conformance.reader --endpoint ipc://…

All but the model is real, as with `worker.fake`: agents from npm run on it, which would get nowhere with a
model as small as those that tests can afford. What it does depends on the conversation alone. Offered a tool
that reads files, it calls it with the path that was asked about; told the result, it repeats the password in
it; offered nothing, it makes a title.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from protocol import lifeline, logs
from protocol.conversation import Conversation, unpack
from protocol.errors import too_long
from protocol.messages import Generate
from protocol.parts import CallDelta, Capabilities
from protocol.workersettings import WorkerSettings
from worker.contract import Draw, Facts, Growth, Model, Prepared, Progress
from worker.fake.engine import END, FakeEngine
from worker.fake.script import Script
from worker.fake.text import FakePipeline, FakePrepared
from worker.line.service import Service

NAME = "reader"
CONTEXT_LENGTH = 131_072
"""In words: agents begin with ten thousand."""

PATHS = ("path", "filePath", "file_path", "absolute_path")
COMMANDS = ("cmd", "command")
READS = ("read", "read_file")
RUNS = ("exec_command", "shell_command", "shell", "bash")
TITLE = "A file is read"
PIECE = 7
"""Letters of a call's arguments that come at once."""

_PATH = re.compile(r"/[\w./-]+\.txt")
_PASSWORD = re.compile(r"password is ([a-z]+-\d+)")


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments`: a JSON object."""

    name: str
    arguments: str


def decide(conversation: Conversation) -> Call | str:
    """What is done next: a call, or something that is said."""
    messages = conversation.messages or []
    results = [_text(message) for message in messages if message["role"] == "tool"]
    if results:
        found = _PASSWORD.search("\n".join(results))
        return f"The password is {found[1]}." if found else "That is not in the file."
    asked = [_text(message) for message in messages if message["role"] == "user"]
    paths = _PATH.findall("\n".join(asked))
    call = _call(conversation.tools or [], paths[-1]) if paths else None
    return call or TITLE


def _call(tools: Sequence[Mapping[str, Any]], path: str) -> Call | None:
    """The call of a tool that reads files, or else of one that runs commands."""
    functions = {tool["function"]["name"].lower(): tool["function"] for tool in tools}
    for names, words, value in ((READS, PATHS, path), (RUNS, COMMANDS, f"cat {path}")):
        for function in (functions[name] for name in names if name in functions):
            known = (function.get("parameters") or {}).get("properties") or {}
            if word := next((word for word in words if word in known), None):
                return Call(function["name"], json.dumps({word: value}))
    return None


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def growths(done: Call | str, id: str) -> list[Growth]:
    """What is done, token by token."""
    if isinstance(done, str):
        return [Growth(word) for word in re.findall(r"\s*\S+", done)]
    pieces = [done.arguments[at : at + PIECE] for at in range(0, len(done.arguments), PIECE)]
    begun = CallDelta(index=0, id=id, name=done.name)
    return [
        Growth(is_content=False, calls=(delta,))
        for delta in (begun, *(CallDelta(index=0, arguments=piece) for piece in pieces))
    ]


@dataclass(frozen=True, slots=True)
class Planned(FakePrepared):
    """A request with all that will be answered."""

    growths: tuple[Growth, ...] = ()


@dataclass(slots=True)
class Preparer:
    scripts: MutableMapping[str, Script]
    context_length: int

    def prepare(self, request: Generate, media: Sequence[bytes]) -> Prepared:
        conversation = unpack(request)
        said = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
        tokens = tuple(1 + len(word) for word in said.split())
        if len(tokens) >= self.context_length:
            raise too_long(self.context_length, len(tokens), "messages", by_memory=False)
        steps = growths(decide(conversation), f"call_{request.id.partition('~')[0]}")
        return Planned(
            id=request.id,
            tokens=tokens,
            draw=Draw(),
            stop=(),
            max_tokens=len(steps) + 1,
            end_tokens=frozenset((END,)),
            resume=tuple(request.resume),
            script=self.scripts.setdefault(request.id, Script(tokens=len(steps))),
            growths=tuple(steps),
        )


@dataclass(slots=True)
class Pipeline(FakePipeline):
    """Each token is the next growth."""

    growths: tuple[Growth, ...] = ()
    pushed: int = 0

    def push(self, token: int) -> Growth:
        growth = self.growths[self.pushed]
        self.pushed += 1
        self.has_called = self.pushed == len(self.growths) and bool(growth.calls)
        return growth


def open_pipeline(request: Prepared) -> Pipeline:
    assert isinstance(request, Planned)
    return Pipeline(request.script, growths=request.growths)


@dataclass(frozen=True, slots=True)
class Loader:
    name: str = NAME

    def load(self, progress: Progress) -> Model:
        scripts: MutableMapping[str, Script] = WeakValueDictionary()
        return Model(
            facts=Facts(self.name, CONTEXT_LENGTH, 0, Capabilities(system_in_place=True)),
            engine=FakeEngine(scripts, step_ms=0.0),
            open_preparer=lambda context_length: Preparer(scripts, context_length),
            open_pipeline=open_pipeline,
        )


def main() -> int:
    """Serve the gateway until told to stop. The exit status."""
    logs.setup("reader", "text", "info")
    lifeline.follow_parent()
    endpoint = sys.argv[sys.argv.index("--endpoint") + 1]
    return Service(Loader(), WorkerSettings(endpoint=endpoint)).run()


if __name__ == "__main__":
    raise SystemExit(main())
