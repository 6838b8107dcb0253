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


def decided(*said: dict[str, Any], must: ToolCallConstraint | None = None) -> Call | str | None:
    return decide(Conversation(list(said), TOOLS), *([must] if must else []))


def test_the_tool_is_called_that_the_question_is_about_or_that_must_be() -> None:
    weather = decided(asked("The weather in Paris for 3 days, please."))
    assert weather == Call("get_weather", {"city": "Paris", "days": 3})
    assert decided(asked("What is the forecast?")) == Call("look", {"city": "Rome", "days": 1})
    assert "Good day." in str(decided(asked("Good day.")))
    assert isinstance(decided(asked("Good day."), must=ToolCallConstraint(required=True)), Call)
    named = decided(asked("Good day."), must=ToolCallConstraint(name="look"))
    assert isinstance(named, Call)
    assert named.name == "look"


def test_a_result_is_told_and_not_asked_for_again() -> None:
    said = [asked("The weather?"), {"role": "assistant", "content": ""}, {"role": "tool", "content": "21 C"}]
    assert str(decided(*said)).endswith("21 C")
    again = decided(*said, {"role": "assistant", "content": "21 C"}, asked("And the weather in Rome?"))
    assert isinstance(again, Call)
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
