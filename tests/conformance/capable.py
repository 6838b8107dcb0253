"""A worker that answers like a capable model: it calls the right tool and reports the result.

The embedded model runs every token; only the words of the answer are forced, in the model's own format."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol import lifeline
from protocol.common import logs
from protocol.conversation import Conversation, unpack
from protocol.messages import Generate
from protocol.settings import reader as settings
from protocol.settings.worker import WorkerSettings
from protocol.types import ToolCallConstraint
from tests.conformance.reader import Call, text_of
from worker.gateway.service import Service
from worker.input.prompts.grammar_choice import offered
from worker.input.prompts.prompt import open_tokenizer
from worker.interfaces import Model, Preparer, Progress
from worker.load.load import ModelLoader
from worker.pocket import MODEL_PATH
from worker.values import NEVER, CancelToken, EngineRequest, Tokenized

Schema = Mapping[str, Any]

DEPTH_MAX = 8
"""Maximum depth of optional properties in arguments."""
WORD_LETTERS_MIN = 4
"""Shorter words occur in every question."""

_WORD = re.compile(r"[a-z]+")
_NAME = re.compile(r"\b[A-Z][a-z]+\b")
_NUMBER = re.compile(r"-?\d+")


def decide(conversation: Conversation, calling: ToolCallConstraint | None = None) -> Call | str | None:
    """Return a capable model's tool call or text; None: there is no conversation."""
    messages, calling = conversation.messages, calling or ToolCallConstraint()
    if not messages:
        return None
    is_result = messages[-1]["role"] == "tool"
    asked = next((text_of(m) for m in reversed(messages) if m["role"] == "user"), "")
    is_forced = calling.required or bool(calling.name)
    if is_forced or not is_result:
        meant = _meant(conversation, calling.name, asked, is_forced=is_forced)
        if meant is not None:
            return meant
    if is_result:
        return f"The tool has answered, and what it says is this: {text_of(messages[-1])}"
    return f"What you have said to me is this, if I have understood you well: {asked}"


def _meant(conversation: Conversation, name: str, asked: str, *, is_forced: bool) -> Call | None:
    """Return the call of the tool that matches the question; of any tool if a call is required."""
    tools = [tool for tool in offered(conversation) if name in ("", tool.name)]
    known = {t["function"]["name"]: t["function"].get("description") or "" for t in conversation.tools or ()}
    words = _words(asked)
    shared = [len(words & _words(f"{tool.name} {known.get(tool.name, '')}")) for tool in tools]
    if not tools or not (is_forced or max(shared)):
        return None
    tool = tools[shared.index(max(shared))]
    schema = tool.schema if isinstance(tool.schema, Mapping) else {}
    return Call(tool.name, made(schema, asked) if schema.get("properties") else {})


def _words(text: str) -> set[str]:
    return {word for word in _WORD.findall(text.lower()) if len(word) >= WORD_LETTERS_MIN}


# --- arguments ---------------------------------------------------------------------------------------


def made(schema: Any, asked: str, root: Schema | None = None, depth: int = 0) -> Any:
    """Return a value for a JSON schema, made from the words of a question; supports some keywords."""
    if not isinstance(schema, Mapping):  # `true` allows any value
        return "anything"
    root = schema if root is None else root
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return made(schema[keyword][0], asked, root, depth)
    if "$ref" in schema:
        return made(_at(root, schema["$ref"]), asked, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        named = (one for one in schema["enum"] if isinstance(one, str) and one.lower() in asked.lower())
        return next(named, schema["enum"][0])
    return _of_type(schema, asked, root, depth)


def _of_type(schema: Schema, asked: str, root: Schema, depth: int) -> Any:
    kinds = schema.get("type", "object" if "properties" in schema else "string")
    match kinds if isinstance(kinds, str) else kinds[0]:
        case "object":
            required = schema.get("required", ())
            known = schema.get("properties", {}).items()
            wanted = ((name, each) for name, each in known if name in required or depth < DEPTH_MAX)
            return {name: made(each, asked, root, depth + 1) for name, each in wanted}
        case "array":
            items = [made(schema.get("items", True), asked, root, depth + 1)]
            return items * max(1, schema.get("minItems", 1)) if depth < DEPTH_MAX else []
        case "integer" | "number":
            found = _NUMBER.search(asked)
            return int(found[0]) if found else schema.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return (_NAME.findall(asked) or ["it"])[-1]


def _at(root: Schema, reference: str) -> Any:
    found: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found[name.replace("~1", "/").replace("~0", "~")]
    return found


# --- the worker --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompter:
    """A `Preparer` that also determines the answer, unless it is left to the model."""

    preparer: Preparer
    tokenizer: TokenizerWrapper

    def prepare(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> EngineRequest:
        prepared = self.preparer.prepare(request, media, cancel_token)
        answer = decide(unpack(request), request.calling) if request.form is None else None
        if answer is None:
            return prepared
        tokens = (*self._tokens(answer), *sorted(self.tokenizer.eos_token_ids)[:1])
        return replace(prepared, sampling=replace(prepared.sampling, forced=tokens))

    def tokenize(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> Tokenized:
        return self.preparer.tokenize(request, media, cancel_token)

    def _tokens(self, answer: Call | str) -> Sequence[int]:
        tokenizer = self.tokenizer
        if isinstance(answer, Call):
            called = json.dumps({"name": answer.name, "arguments": answer.arguments}, ensure_ascii=False)
            answer = f"{tokenizer.tool_call_start}\n{called}\n{tokenizer.tool_call_end}"
        tokens: Sequence[int] = tokenizer.encode(answer, add_special_tokens=False)
        return tokens


class Loader:
    def __init__(self) -> None:
        self._loader = ModelLoader(None)
        self.name = self._loader.name

    def load(self, progress: Progress) -> Model:
        model = self._loader.load(progress)
        assert isinstance(model, Model)

        def open_preparer(context_length: int) -> Prompter:
            return Prompter(model.open_preparer(context_length), open_tokenizer(MODEL_PATH, ()))

        return replace(model, open_preparer=open_preparer)


def main() -> int:
    configured = settings.read_or_exit(
        WorkerSettings,
        "worker",
        sys.argv[1:],
        os.environ,
        program="capable",
        about="A worker that knows the answer.",
    )
    logs.setup("capable", "text", "info")
    lifeline.follow_parent()
    return Service(Loader(), configured).run()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # like `worker`: MLX's threads abort in the interpreter's teardown
