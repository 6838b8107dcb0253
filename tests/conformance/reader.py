"""A worker that reads a file like a capable model: it calls the tool and reports the result.

Agents from npm run on it, because the small models of the tests are too weak for them."""

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
from protocol.types import CallDelta, Capabilities
from protocol.worker_settings import WorkerSettings
from tests.scripted_worker.engine import END, FakeEngine
from tests.scripted_worker.script import Script
from tests.scripted_worker.text import FakePipeline, FakePrepared
from worker.contract.engine import (
    EngineRequest,
    Model,
    ModelInfo,
    OutputDelta,
    Progress,
    SamplingParams,
    Tokenized,
)
from worker.contract.preparation import NEVER, CancelToken
from worker.transport.service import Service

NAME = "reader"
CONTEXT_LENGTH = 131_072
"""Words; agents' first prompts have ten thousand."""

PATHS = ("path", "filePath", "file_path", "absolute_path")
COMMANDS = ("cmd", "command")
READS = ("read", "read_file")
RUNS = ("exec_command", "shell_command", "shell", "bash")
TITLE = "A file is read"
PIECE = 7
"""Characters of a call's arguments in each delta."""

_PATH = re.compile(r"/[\w./-]+\.txt")
_PASSWORD = re.compile(r"password is ([a-z]+-\d+)")


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments`: a JSON object."""

    name: str
    arguments: str


def decide(conversation: Conversation) -> Call | str:
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
    """Return a call of a tool that reads files, or else of one that runs commands."""
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


def growths(done: Call | str, id: str) -> list[OutputDelta]:
    """Return the deltas of an answer, one for each token."""
    if isinstance(done, str):
        return [OutputDelta(word) for word in re.findall(r"\s*\S+", done)]
    pieces = [done.arguments[at : at + PIECE] for at in range(0, len(done.arguments), PIECE)]
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
        conversation = unpack(request)
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


def _tokens(conversation: Conversation) -> tuple[int, ...]:
    """Return a token for each word of the conversation and its tools."""
    said = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
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
    endpoint = sys.argv[sys.argv.index("--endpoint") + 1]
    return Service(Loader(), WorkerSettings(endpoint=endpoint)).run()


if __name__ == "__main__":
    raise SystemExit(main())
