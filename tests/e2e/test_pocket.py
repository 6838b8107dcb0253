"""The embedded model over HTTP: tests would show a lost message or system prompt, or half a character."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from recipes.pocket.fillers import Fillers
from recipes.pocket.objects import objects
from tests.system import System, chat_body, running_system


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("pocket")) as system:
        system.start_worker(module="worker")
        system.wait_ready()
        yield system


def chosen(system: System, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = system.http.post("/v1/chat/completions", json={"messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def answer(system: System, *messages: dict[str, Any], **fields: Any) -> str:
    choice = chosen(system, *messages, **fields)
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_it_is_called_pocket_and_answers_without_being_told_how(system: System) -> None:
    reply = system.http.post("/v1/chat/completions", json=chat_body("Hello")).json()
    assert reply["model"] == "pocket"
    assert "Hello" in reply["choices"][0]["message"]["content"]


def test_a_fact_from_earlier_turns_is_remembered(system: System) -> None:
    said = {"role": "assistant", "content": "Nice to meet you!"}
    assert "Brynhild" in answer(system, user("My name is Brynhild."), said, user("What is my name?"))


def test_a_developer_message_in_the_conversation_reaches_the_model(system: System) -> None:
    told = {"role": "developer", "content": "The user lives in Reykjavik."}
    assert "Reykjavik" in answer(system, told, user("Where do I live?"))


def test_two_messages_in_a_row_are_both_read(system: System) -> None:
    assert "Brynhild" in answer(system, user("My name is Brynhild."), user("What is my name?"))


def test_other_scripts_and_emoji_come_back_as_they_went(system: System) -> None:
    assert answer(system, user("Repeat: the quick brown fox 🦊 駅")) == "the quick brown fox 🦊 駅"


def schema(*names: str, required: int | None = None) -> dict[str, Any]:
    """Return the schema of an object of strings whose first `required` names are required; None: all."""
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": list(names[:required])}


def tool(name: str, *parameters: str, required: int | None = None) -> dict[str, Any]:
    function = {"name": name, "parameters": schema(*parameters, required=required)}
    return {"type": "function", "function": function}


TIDE = tool("get_tide", "port")
FILES = [tool("list_files", "path"), tool("read_file", "path"), tool("delete_file", "path")]
WEATHER = tool("get_current_weather", "location", "unit", required=1)


@pytest.mark.parametrize(
    ("question", "tools", "calls"),
    [
        ("What is the tide in Brest?", [TIDE], [("get_tide", {"port": "Brest"})]),
        (
            "What is the tide in Brest and Vaduz?",
            [TIDE],
            [("get_tide", {"port": "Brest"}), ("get_tide", {"port": "Vaduz"})],
        ),
        ("Delete the file main.py", FILES, [("delete_file", {"path": "main.py"})]),
        (
            "What's the weather like in Quito today?",
            [WEATHER],
            [("get_current_weather", {"location": "Quito"})],
        ),
    ],
)
def test_tools_never_seen_before_are_called_with_their_arguments(
    system: System, question: str, tools: list[dict[str, Any]], calls: list[tuple[str, dict[str, Any]]]
) -> None:
    choice = chosen(system, user(question), tools=tools)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(made["name"], json.loads(made["arguments"])) for made in functions] == calls


def test_it_is_made_to_call_one_tool_of_several_and_none_other(system: System) -> None:
    wanted = {"type": "function", "function": {"name": "list_files"}}
    choice = chosen(system, user("Hello"), tools=FILES, tool_choice=wanted)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "list_files"
    assert isinstance(json.loads(call["function"]["arguments"])["path"], str)


@pytest.mark.parametrize("seed", range(6))
def test_objects_are_made_as_their_schemas_say(system: System, seed: int) -> None:
    dialogue = objects(Fillers(random.Random(seed), held_out=True))
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
LOOSE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [user("Hi")], "json_schema": TAGS},
    "/v1/completions": {"prompt": "Hi", "json_schema": json.dumps(TAGS)},
    "/v1/responses": {"input": "Hi", "text": {"format": {"type": "json_schema", "schema": TAGS}}},
}


@pytest.mark.parametrize("path", LOOSE)
@pytest.mark.parametrize("stream", [False, True])
def test_schema_is_relaxed_and_the_response_header_names_what_was(
    path: str, stream: bool, system: System
) -> None:
    reply = system.http.post(path, json=LOOSE[path] | {"stream": stream})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-roundhouse-schema-relaxed"] == "uniqueItems"


def test_strict_schema_that_cannot_be_enforced_is_refused_with_its_keyword(system: System) -> None:
    strict = {"name": "tags", "schema": TAGS, "strict": True}
    format = {"type": "json_schema", "json_schema": strict}
    output = {"format": {"type": "json_schema", "schema": TAGS}}
    anthropics = {"max_tokens": 9, "messages": [user("Hi")], "output_config": output}
    for path, body in (
        ("/v1/chat/completions", {"messages": [user("Hi")], "response_format": format}),
        ("/v1/completions", {"prompt": "Hi", "guided_json": TAGS}),
        ("/v1/messages", anthropics),
    ):
        reply = system.http.post(path, json=body)
        assert reply.status_code == 400, path
        assert "uniqueItems" in reply.json()["error"]["message"]


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


def test_the_tokens_of_an_answer_that_is_begun_end_with_it(system: System) -> None:
    body = {"messages": [user("Hello"), {"role": "assistant", "content": "Good day"}]}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    tokens = system.http.post("/tokenize", json=body).json()["tokens"]
    assert system.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"].endswith("Good day")
