"""The answers of the capable worker: a function of the conversation and its tools."""

from __future__ import annotations

import math
from typing import Any

import jsonschema
import pytest

from protocol.conversation import Conversation
from protocol.types import ToolCallConstraint
from tests.conformance.capable import MEANT, Call, decide, leant, made
from worker.contract.engine import Logprob

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str, description: str = "", parameters: Any = None) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters or CITY},
    }


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


TOOLS = [tool("get_time", "The time of day"), tool("get_weather"), tool("look", "Look at the forecast")]


@pytest.mark.parametrize(
    ("question", "call"),
    [
        ("The weather in Paris for 3 days, please.", Call("get_weather", {"city": "Paris", "days": 3})),
        ("What is the forecast?", Call("look", {"city": "Rome", "days": 1})),
        ("Good day.", None),
    ],
)
def test_the_tool_is_called_that_the_question_is_about(question: str, call: Call | None) -> None:
    done = decide(Conversation([asked(question)], TOOLS))
    assert done == call if call else "Good day." in str(done)


def test_a_call_that_must_be_is_made_whatever_is_asked() -> None:
    conversation = Conversation([asked("Good day.")], TOOLS)
    assert isinstance(decide(conversation, ToolCallConstraint(required=True)), Call)
    named = decide(conversation, ToolCallConstraint(name="look"))
    assert isinstance(named, Call)
    assert named.name == "look"


def test_a_result_is_told_and_not_asked_for_again() -> None:
    said = [asked("The weather?"), {"role": "assistant", "content": ""}, {"role": "tool", "content": "21 C"}]
    assert str(decide(Conversation(said, TOOLS))).endswith("21 C")
    further = [*said, {"role": "assistant", "content": "21 C"}, asked("And the weather in Rome?")]
    assert isinstance(decide(Conversation(further, TOOLS)), Call)


def test_without_a_conversation_nothing_is_known() -> None:
    assert decide(Conversation()) is None


@pytest.mark.parametrize(
    "schema",
    [
        CITY,
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
        {"anyOf": [{"type": "null"}, {"type": "string"}]},
        {"type": ["number", "null"], "minimum": 5},
        {"const": {"a": 1}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}}},
        {"properties": {"any": True}},
    ],
)
def test_arguments_fit_their_schema(schema: dict[str, Any]) -> None:
    jsonschema.validate(made(schema, "Nothing that helps"), schema)


def test_intended_token_is_most_likely_and_probabilities_sum_to_one() -> None:
    found = Logprob(math.log(0.1), ((7, math.log(0.6)), (8, math.log(0.3)), (9, math.log(0.1))))
    told = leant(found, 9)
    assert [token for token, _ in told.top] == [9, 7, 8]
    assert told.top[0][1] == told.logprob > math.log(MEANT)
    assert math.isclose(sum(math.exp(logprob) for _, logprob in told.top), 1)
    assert [token for token, _ in leant(found, 5).top] == [5, 7, 8]
    assert leant(Logprob(-1.0), 5).top == ()
