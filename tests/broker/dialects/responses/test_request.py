"""Request bodies of the responses API: fields sent to the worker, echoed, and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.dialects.body import encode
from broker.dialects.responses import body, request
from protocol.conversation import unpack
from protocol.errors import RequestError
from protocol.messages import Generate
from protocol.types import StructuredOutput

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["b"]}


def read(**fields: Any) -> body.Body:
    return body.read(json.dumps({"input": "hello", **fields}).encode())


def generate(**fields: Any) -> Generate:
    asked = read(**fields)
    messages = [{"role": "user", "content": "hello"}]
    return request.generate(asked, request.offered(asked), messages, [], id="resp_1", incarnation="g")


def envelope(**fields: Any) -> Any:
    made = request.envelope(read(**fields), id="resp_1", model="m", created_at=7, kept=True)
    return json.loads(encode(made))


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        generate(**fields)
    return caught.value


# --- fields sent to the worker -----------------------------------------------------------------------


def test_parameters_are_passed_on() -> None:
    made = generate(
        max_output_tokens=9, temperature=0.5, top_p=0.9, seed=3, top_k=4, stop=["x"], priority=-1,
        cache_salt="s",
    )  # fmt: skip
    assert (made.max_tokens, made.stop, made.priority, made.cache_salt) == (9, ["x"], -1, "s")
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.9, 3, 4)
    assert made.source == "input"
    assert generate().max_tokens is None


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
    ],
)
def test_likelihoods_are_asked_for_in_either_way(fields: dict[str, Any], logprobs: int | None) -> None:
    assert generate(**fields).sampling.logprobs == logprobs


def test_an_effort_is_a_wish_to_the_template() -> None:
    made = generate(reasoning={"effort": "none", "summary": "auto"}, thinking_budget=5)
    assert unpack(made).options == {"reasoning_effort": "none", "enable_thinking": False}
    assert made.thinking_budget == 5
    wishes = {"chat_template_kwargs": {"a": 1}, "enable_thinking": True}
    assert unpack(generate(**wishes)).options == {"a": 1, "enable_thinking": True}


def test_a_format_is_the_form_of_the_answer() -> None:
    schema = {"type": "json_schema", "name": "t", "strict": True, "schema": SCHEMA}
    made = generate(text={"format": schema, "verbosity": "low"})
    assert made.form == StructuredOutput(
        kind="json_schema", text=json.dumps(SCHEMA), param="text.format.schema"
    )
    made = generate(text={"format": schema | {"strict": None}})
    assert made.form is not None
    assert not made.form.strict
    assert generate(text={"format": {"type": "json_object"}}).form == StructuredOutput(
        kind="json_object", param="text.format"
    )
    assert generate(text={"format": {"type": "text"}}).form is None


# --- fields echoed in the response -------------------------------------------------------------------


def test_a_response_repeats_what_was_asked_for_with_openais_defaults() -> None:
    shown = envelope()
    assert (shown["tools"], shown["tool_choice"], shown["parallel_tool_calls"]) == ([], "auto", True)
    assert (shown["temperature"], shown["top_p"], shown["metadata"]) == (1, 1, {})
    assert shown["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (shown["store"], shown["created_at"], shown["truncation"]) == (True, 7, "disabled")
    assert shown["reasoning"] == {"effort": None, "summary": None}
    schema = {"type": "json_schema", "name": "t", "strict": True, "schema": SCHEMA}
    shown = envelope(
        instructions="i", temperature=0, metadata={"a": "b"},
        tools=[{"type": "function", "name": "f"}, {"type": "web_search", "x": 1}],
        tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False, max_output_tokens=20,
        max_tool_calls=2, text={"format": schema},
        reasoning={"effort": "high", "generate_summary": "concise"}, user="u", truncation="auto",
    )  # fmt: skip
    assert (shown["instructions"], shown["temperature"], shown["metadata"]) == ("i", 0, {"a": "b"})
    assert shown["tools"][0] == {
        "type": "function", "name": "f", "description": None, "parameters": None, "strict": None,
    }  # fmt: skip
    assert shown["tools"][1] == {"type": "web_search", "x": 1}
    assert shown["tool_choice"] == {"type": "function", "name": "f"}
    assert (shown["max_output_tokens"], shown["max_tool_calls"], shown["user"]) == (20, 2, "u")
    assert shown["text"]["format"] == schema | {"description": None}
    assert shown["reasoning"] == {"effort": "high", "summary": "concise"}
    assert shown["truncation"] == "disabled"


@pytest.mark.parametrize(
    ("fields", "summarized", "sealed"),
    [
        ({"reasoning": {"summary": "none"}}, False, False),
        ({"reasoning": {"generate_summary": "detailed"}}, True, False),
        ({"include": ["reasoning.encrypted_content"]}, False, True),
    ],
)
def test_thoughts_are_told_as_they_were_asked_for(
    fields: dict[str, Any], summarized: bool, sealed: bool
) -> None:
    asked = read(**fields)
    style = request.style(asked, request.offered(asked))
    assert (style.summarized, style.sealed) == (summarized, sealed)


# --- refused fields ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ["x"]}, "input[0]"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"background": True, "store": False}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"include": "all"}, "include"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "t"}}}, "text.format.schema"),
    ],
)
def test_invalid_request_error_names_the_param(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.param, error.kind.status) == (param, 400)
