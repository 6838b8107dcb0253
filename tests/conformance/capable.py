"""A worker that answers as a good model would: it calls the tool that is meant, and tells what came of it.

    python -m tests.conformance.capable --endpoint ipc://…

It is the real worker with the embedded model, which runs every token; only what a small model would not find,
the words of an answer, is forced on it, in the model's own format. They depend on the conversation alone:

* a result is told;
* of the tools, the one is called whose name and description have most words in common with the question, or
  whichever must be called, with arguments that are made of its schema and the question's words;
* anything else is said back.

So the model that clients meet is a mixture: most of the probability is on these words, the rest is where the
embedded model has it. Left to that model is what has a form, and what is no conversation.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol import lifeline, logs, settings
from protocol.conversation import Conversation, unpack
from protocol.messages import Generate
from protocol.parts import Calling
from protocol.workersettings import WorkerSettings
from worker.contract import Draw, Engine, Likelihood, Model, Prepared, Preparer, Progress, Step, Tokenized
from worker.line.service import Service
from worker.models.holding import offered
from worker.models.load import ModelLoader
from worker.models.prompt import open_tokenizer
from worker.pocket import MODEL_PATH

Schema = Mapping[str, Any]

DEPTH_MAX = 8
"""Of arguments: properties deeper than that are left out unless they are required."""
WORD_LETTERS_MIN = 4
"""Shorter words are in every question."""
MEANT = 0.99
"""The share of the probability that is on what is meant."""

_WORD = re.compile(r"[a-z]+")
_NAME = re.compile(r"\b[A-Z][a-z]+\b")
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Any


def decide(conversation: Conversation, calling: Calling | None = None) -> Call | str | None:
    """What a good model does next: it calls, or says something; None: there is no conversation."""
    messages, calling = conversation.messages, calling or Calling()
    if not messages:
        return None
    is_result = messages[-1]["role"] == "tool"
    asked = next((_text(m) for m in reversed(messages) if m["role"] == "user"), "")
    is_forced = calling.required or bool(calling.name)
    if is_forced or not is_result:
        meant = _meant(conversation, calling.name, asked, is_forced=is_forced)
        if meant is not None:
            return meant
    if is_result:
        return f"The tool has answered, and what it says is this: {_text(messages[-1])}"
    return f"What you have said to me is this, if I have understood you well: {asked}"


def _meant(conversation: Conversation, name: str, asked: str, *, is_forced: bool) -> Call | None:
    """The call of the tool that the question is about; of some tool in any case, if there must be a call."""
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


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


# --- arguments ---------------------------------------------------------------------------------------


def made(schema: Any, asked: str, root: Schema | None = None, depth: int = 0) -> Any:
    """Something that fits a JSON schema, as far as these keywords tell, out of the words of a question."""
    if not isinstance(schema, Mapping):  # true, for anything
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
    """`contract.Preparer` that also says what will be answered, where that is not the model's own matter."""

    preparer: Preparer
    tokenizer: TokenizerWrapper

    def prepare(self, request: Generate, media: Sequence[bytes]) -> Prepared:
        prepared = self.preparer.prepare(request, media)
        answer = decide(unpack(request), request.calling) if request.form is None else None
        if answer is None:
            return prepared
        tokens = (*self._tokens(answer), *sorted(self.tokenizer.eos_token_ids)[:1])
        return replace(prepared, draw=replace(prepared.draw, forced=tokens))

    def tokenize(self, request: Generate, media: Sequence[bytes]) -> Tokenized:
        return self.preparer.tokenize(request, media)

    def _tokens(self, answer: Call | str) -> Sequence[int]:
        tokenizer = self.tokenizer
        if isinstance(answer, Call):
            called = json.dumps({"name": answer.name, "arguments": answer.arguments}, ensure_ascii=False)
            answer = f"{tokenizer.tool_call_start}\n{called}\n{tokenizer.tool_call_end}"
        tokens: Sequence[int] = tokenizer.encode(answer, add_special_tokens=False)
        return tokens


@dataclass(slots=True)
class _Row:
    """`place`: of the next token in its answer."""

    forced: tuple[int, ...]
    place: int


@dataclass(slots=True)
class Leaning:
    """`contract.Engine` of the mixture: what is forced is likely. All else the engine does."""

    engine: Engine
    rows: dict[str, _Row] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def start(self, row: str, tokens: Sequence[int], prompt_tokens: int, draw: Draw) -> None:
        self.rows[row] = _Row(draw.forced, len(tokens) - prompt_tokens)
        self.engine.start(row, tokens, prompt_tokens, draw)

    def drop(self, row: str) -> None:
        self.rows.pop(row, None)
        self.engine.drop(row)

    def step(self) -> Step:
        step, told = self.engine.step(), {}
        for name, token in step.tokens.items():
            row = self.rows[name]
            if (found := step.likelihoods.get(name)) is not None:
                told[name] = leant(found, token) if row.place < len(row.forced) else found
            row.place += 1
        return replace(step, likelihoods=told)


def leant(found: Likelihood, token: int) -> Likelihood:
    """How likely a token is that the mixture means, and the others beside it."""
    logprob = math.log(MEANT + (1 - MEANT) * math.exp(found.logprob))
    others = [(other, math.log(1 - MEANT) + of) for other, of in found.top if other != token]
    return Likelihood(logprob, ((token, logprob), *others)[: len(found.top)])


class Loader:
    """`contract.Loader`."""

    def __init__(self) -> None:
        self._loader = ModelLoader(None)
        self.name = self._loader.name

    def load(self, progress: Progress) -> Model:
        model = self._loader.load(progress)
        assert isinstance(model, Model)

        def open_preparer(context_length: int) -> Prompter:
            return Prompter(model.open_preparer(context_length), open_tokenizer(MODEL_PATH, ()))

        engine = cast(Engine, Leaning(model.engine))
        return replace(model, engine=engine, open_preparer=open_preparer)


def main() -> int:
    """Serve the gateway until told to stop. The exit status."""
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
    os._exit(status)  # as `worker` does: MLX's threads abort in the interpreter's teardown
