"""The embedded model over HTTP: a dropped message, a lost system prompt or half a character would show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system import System, chat_body, running_system


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("pocket")) as system:
        system.start_worker(module="worker")
        system.wait_ready()
        yield system


def answer(system: System, *messages: dict[str, Any], **fields: Any) -> str:
    reply = system.http.post("/v1/chat/completions", json={"messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
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


def test_a_tool_never_seen_before_is_called_with_its_argument(system: System) -> None:
    parameters = {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]}
    tool = {"type": "function", "function": {"name": "get_tide", "parameters": parameters}}
    text = answer(system, user("What is the tide in Brest?"), tools=[tool])
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert call == {"name": "get_tide", "arguments": {"port": "Brest"}}
