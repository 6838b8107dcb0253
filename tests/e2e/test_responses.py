"""OpenAI's client at /v1/responses, with the scripted worker, and the embedded model for stored responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

from tests.dialects import tool

NOTE = tool("responses", "note", "words")
EVERYTHING = "!think=3 !call=2 !tokens=24"
"""Three reasoning tokens, two words, and two tool calls."""


def ask(client: openai.OpenAI, input: Any, **fields: Any) -> Response:
    answer = client.responses.create(model=fields.pop("model", "fake"), input=input, **fields)
    assert isinstance(answer, Response)
    return answer


def told(response: Response) -> dict[str, Any]:
    """Return the fields that are equal in repeated answers."""
    stem = response.id.removeprefix("resp_")
    fields = json.loads(response.to_json().replace(stem, "STEM"))
    for name in ("created_at", "completed_at"):
        fields.pop(name)
    return dict(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [NOTE], "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {
            "instructions": "Be terse.",
            "temperature": 0.5,
            "metadata": {"a": "b"},
            "parallel_tool_calls": False,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
        },
    ],
    ids=["everything", "settings"],
)
def test_streamed_response_equals_the_unstreamed_one(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    fields = {"extra_body": {"seed": 7}, "store": False, **fields}
    whole = ask(client, EVERYTHING, **fields)
    events = list(client.responses.create(model="fake", input=EVERYTHING, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert told(last.response) == told(whole)
    assert (last.type == "response.incomplete") == (whole.incomplete_details is not None)
    texts = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert texts == whole.output_text


def test_response_has_reasoning_text_and_calls_of_the_clients_types(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input=EVERYTHING, tools=[NOTE]) as stream:
        kinds = {event.type for event in stream}
        response = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert (response.status, bool(response.output_text)) == ("completed", True)
    [thought, message, *calls] = response.output[:4]
    assert isinstance(thought, ResponseReasoningItem)
    assert thought.content
    assert isinstance(message, ResponseOutputMessage)
    assert len(calls) == 2
    for call in calls:
        assert isinstance(call, ResponseFunctionToolCall)
        assert call.name == "note"
        assert json.loads(call.arguments).keys() == {"words"}
    assert response.usage.output_tokens_details.reasoning_tokens == 3


def test_the_embedded_model_remembers_by_the_id_alone_until_it_is_deleted(client: openai.OpenAI) -> None:
    first = ask(client, "My name is Brynhild.", model="pocket", temperature=0)
    asked: dict[str, Any] = {"model": "pocket", "temperature": 0, "input": "What is my name?"}
    second = client.responses.create(previous_response_id=first.id, **asked)
    assert "Brynhild" in second.output_text
    assert "Brynhild" not in client.responses.create(**asked).output_text
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "one"}], metadata={"topic": "rail"}
    )
    client.responses.create(model="pocket", input="hello", conversation=conversation.id)
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message"] * 3


def test_running_response_can_be_cancelled_by_another_request(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="fake", input="x !slow=50 !tokens=4000", stream=True)
    first = next(stream)
    assert first.type == "response.created"
    cancelled = client.responses.cancel(first.response.id)
    assert cancelled.status == "cancelled"
    [*_, last] = stream
    assert last.type == "response.incomplete"
    assert last.response == client.responses.retrieve(first.response.id) == cancelled


def test_a_failure_in_a_stream_raises_in_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError, match="failed on this request"):
        list(client.responses.create(model="fake", input="x !fail=3", stream=True))


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "no-such"}, openai.NotFoundError, "model"),
        ({"input": "word " * 9000}, openai.BadRequestError, "input"),
    ],
)
def test_errors_are_of_the_classes_that_the_client_knows(
    client: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        client.responses.create(**{"model": "fake", "input": "x", **fields})
    assert caught.value.param == param
    assert "openai-processing-ms" in caught.value.response.headers
