"""The embedded model over HTTP: tests would show a lost message or system prompt, or half a character; and
reasoning, also of a model whose prompts start it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest

from recipes.pocket.fillers import Fillers
from recipes.pocket.objects import objects
from tests.system import System, chat_body, sse_documents


def chosen(system: System, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = system.http.post("/v1/chat/completions", json={"model": "pocket", "messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def answer(system: System, *messages: dict[str, Any], **fields: Any) -> str:
    choice = chosen(system, *messages, **fields)
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


MY_NAME, ASKED = user("My name is Brynhild."), user("What is my name?")


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([MY_NAME, {"role": "assistant", "content": "Nice to meet you!"}, ASKED], "Brynhild"),
        (
            [{"role": "developer", "content": "The user lives in Reykjavik."}, user("Where do I live?")],
            "Reykjavik",
        ),
        ([user("Repeat: the quick brown fox 🦊 駅")], "the quick brown fox 🦊 駅"),
    ],
    ids=["an earlier turn", "a developer message", "other scripts"],
)
def test_messages_reach_the_model(system: System, messages: list[dict[str, Any]], word: str) -> None:
    assert word in answer(system, *messages)


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TIDE = tool("get_tide", "port")
FILES = [tool("list_files", "path"), tool("read_file", "path"), tool("delete_file", "path")]


@pytest.mark.parametrize(
    ("question", "tools", "calls"),
    [
        (
            "What is the tide in Brest and Vaduz?",
            [TIDE],
            [("get_tide", {"port": "Brest"}), ("get_tide", {"port": "Vaduz"})],
        ),
        ("Delete the file main.py", FILES, [("delete_file", {"path": "main.py"})]),
    ],
)
def test_tools_never_seen_before_are_called_with_their_arguments(
    system: System, question: str, tools: list[dict[str, Any]], calls: list[tuple[str, dict[str, Any]]]
) -> None:
    choice = chosen(system, user(question), tools=tools)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(made["name"], json.loads(made["arguments"])) for made in functions] == calls


def test_an_object_is_made_as_its_schema_says(system: System) -> None:
    dialogue = objects(Fillers(random.Random(0), held_out=True))
    expected = json.loads(dialogue.answer)
    properties = {
        name: {"type": "integer" if isinstance(expected[name], int) else "string"} for name in expected
    }
    form = {
        "type": "object",
        "properties": properties,
        "required": list(expected),
        "additionalProperties": False,
    }
    described = {"type": "json_schema", "json_schema": {"name": "made", "schema": form}}
    made = json.loads(answer(system, *dialogue.messages[:-1], response_format=described))
    jsonschema.validate(made, form)
    assert list(made) == list(expected)


TAGS = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 3}


def test_schema_is_relaxed_with_a_header_or_refused_with_its_keyword_if_it_is_strict(system: System) -> None:
    loose = {"messages": [user("Hi")], "json_schema": TAGS, "stream": True}
    reply = system.http.post("/v1/chat/completions", json=loose | {"model": "pocket"})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-roundhouse-schema-relaxed"] == "uniqueItems"
    output = {"format": {"type": "json_schema", "schema": TAGS}}
    strict = {"max_tokens": 9, "messages": [user("Hi")], "output_config": output}
    reply = system.http.post("/v1/messages", json=strict | {"model": "pocket"})
    assert reply.status_code == 400
    assert "uniqueItems" in reply.json()["error"]["message"]
    given = {"type": "object", "properties": {"tags": TAGS}, "required": ["tags"]}
    whole = {"messages": [user("Hi")], "tools": [{"name": "tag", "input_schema": given}]}
    for stream in (False, True):  # and so are the arguments of a tool that must be called
        calls = {"max_tokens": 60, "tool_choice": {"type": "any"}, "stream": stream, "model": "pocket"}
        reply = system.http.post("/v1/messages", json=whole | calls)
        assert reply.headers["x-roundhouse-schema-relaxed"] == "uniqueItems"


def test_an_answer_that_is_begun_is_gone_on_with(system: System) -> None:
    asked = user("What is the capital of France?")
    silent = {"temperature": 0, "enable_thinking": False}
    whole = answer(system, asked, **silent)
    begun, rest = whole[: whole.rindex(" ")], whole[whole.rindex(" ") :]
    said = {"role": "assistant", "content": begun}
    assert answer(system, asked, said, **silent, continue_final_message=True) == rest
    assert answer(system, asked, said, **silent) != rest
    body = {"model": "pocket", "max_tokens": 50, "messages": [asked, said], "temperature": 0}
    reply = system.http.post("/v1/messages", json=body | {"thinking": {"type": "disabled"}}).json()
    assert "".join(block["text"] for block in reply["content"]) == rest


# --- reasoning -----------------------------------------------------------------------------------------

QUESTION = "Repeat: Quito"
THOUGHT, CONTENT = "I repeat the text as it is.\n", "\n\nQuito"


@dataclass
class Answer:
    """A choice, from a stream or a document."""

    reasoning: str = ""
    content: str = ""
    reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    entries: list[Any] = field(default_factory=list)

    def take(self, choice: dict[str, Any]) -> None:
        said = choice.get("delta") or choice.get("message") or {}
        assert said.get("reasoning") == said.get("reasoning_content")
        self.reasoning += said.get("reasoning_content") or ""
        self.content += said.get("content") or ""
        self.reason = choice["finish_reason"] or self.reason
        self.entries += (choice["logprobs"] or {}).get("content", [])


def ask(system: System, text: str = QUESTION, **fields: Any) -> Answer:
    """Return the answer, which must be equal in a stream and a document."""
    fields = {"model": "pocket"} | fields
    reply = system.http.post("/v1/chat/completions", json=chat_body(text, **fields))
    assert reply.status_code == 200, reply.text
    whole = Answer(usage=reply.json()["usage"])
    whole.take(reply.json()["choices"][0])
    streamed = Answer()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = system.http.post("/v1/chat/completions", json=chat_body(text, **fields, **options))
    *events, done = sse_documents(iter(reply.text.split("\n")))
    assert done == "[DONE]"
    for event in map(json.loads, events):
        streamed.usage = event["usage"] or streamed.usage
        for choice in event["choices"]:
            streamed.take(choice)
    for usage in (whole.usage, streamed.usage):
        del usage["prompt_tokens_details"]  # the second is served from the cache
    assert streamed == whole
    return whole


def thought_tokens(answer: Answer) -> int:
    return int(answer.usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0))


def test_a_thought_is_told_apart_when_it_is_asked_for(system: System) -> None:
    answer = ask(system, enable_thinking=True, logprobs=True)
    assert (answer.reasoning, answer.content, answer.reason) == (THOUGHT, CONTENT, "stop")
    assert "".join(entry["token"] for entry in answer.entries) == CONTENT
    assert 0 < thought_tokens(answer) < answer.usage["completion_tokens"]


def test_reasoning_is_absent_when_not_enabled_and_well_formed_when_cut(system: System) -> None:
    answer = ask(system, chat_template_kwargs={"enable_thinking": False})
    assert (answer.reasoning, answer.content) == ("", "Quito")
    assert "completion_tokens_details" not in answer.usage
    for tokens in (1, 10):
        answer = ask(system, enable_thinking=True, max_tokens=tokens)
        assert THOUGHT.startswith(answer.reasoning)
        assert (answer.content, answer.reason, thought_tokens(answer)) == ("", "length", tokens)


def test_a_thought_is_closed_when_it_has_its_tokens(system: System) -> None:
    whole = ask(system, enable_thinking=True)
    for budget in (1, thought_tokens(whole) - 1):
        answer = ask(system, enable_thinking=True, thinking_budget=budget)
        assert thought_tokens(answer) == budget
        assert THOUGHT.startswith(answer.reasoning)
        assert answer.content.startswith("\n\n")
    assert ask(system, enable_thinking=True, thinking_token_budget=thought_tokens(whole)) == whole
