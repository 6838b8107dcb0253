"""Chat answers of one choice: text, reasoning, tool calls and errors, in streams and documents alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from broker.dialects import answer, chat, openai
from broker.dialects.body import encode
from broker.dispatch.flight import Item
from protocol.errors import KINDS, Code, RequestError
from protocol.types import CallDelta, Delta, Usage
from tests import factories
from tests.factories import failed

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "org/m"}


def items(*deltas: Delta, reason: str = "stop", **usage: int) -> list[Item]:
    counted = Usage(prompt_tokens=5, completion_tokens=len(deltas), **usage)
    return [factories.accepted(), *deltas, factories.finished(reason=reason, usage=counted)]


def delta(text: str = "", *calls: CallDelta, reasoning: str = "") -> Delta:
    return factories.delta(text, reasoning=reasoning, calls=[*calls])


def begun(index: int, name: str = "f", arguments: str = "") -> CallDelta:
    return CallDelta(index=index, id=f"call_{index}", name=name, arguments=arguments)


def more(index: int, arguments: str) -> CallDelta:
    return CallDelta(index=index, arguments=arguments)


def streamed(output: list[Item], *, include_usage: bool = False, **form: bool) -> bytes:
    renderer = chat.ChatChoiceRenderer(**{"logprobs": False, **form})
    stream = answer.ChoiceSseRenderer(HEAD.copy, renderer, choices=1, include_usage=include_usage)
    return stream.feed([(0, output)])


def chunks(output: list[Item], **form: bool) -> list[dict[str, Any]]:
    *events, done, rest = streamed(output, **form).decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def entries(output: list[Item]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks(output)]


def document(output: list[Item], **form: bool) -> dict[str, Any]:
    renderer = chat.ChatChoiceRenderer(**{"logprobs": False, **form})
    found: dict[str, Any] = json.loads(
        answer.ChoiceDocumentRenderer(HEAD.copy, renderer, choices=1).feed([(0, output)])
    )
    return found


def whole(output: list[Item], **form: bool) -> dict[str, Any]:
    choice: dict[str, Any] = document(output, **form)["choices"][0]
    return choice


# --- text and usage ----------------------------------------------------------------------------------


def test_a_stream_is_exactly_these_events() -> None:
    head = 'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"org/m"'
    tail = '"logprobs":null,"finish_reason":null}]}\n\n'
    assert streamed(items(delta("all "), delta(), delta("aboard"), reason="length")).decode() == (
        f'{head},"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},{tail}'
        f'{head},"choices":[{{"index":0,"delta":{{"content":"all "}},{tail}'
        f'{head},"choices":[{{"index":0,"delta":{{"content":"aboard"}},{tail}'
        f'{head},"choices":[{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"length"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


def test_a_document_is_exactly_this_and_a_stream_ends_with_its_usage() -> None:
    output = items(delta("all "), delta("aboard"), cached_tokens=3, accepted_tokens=6, rejected_tokens=2)
    message = {"role": "assistant", "content": "all aboard", "refusal": None}
    usage = {
        "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2},
    }  # fmt: skip
    assert document(output) == HEAD | {
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": usage,
    }
    *before, last = chunks(output, include_usage=True)
    assert last == HEAD | {"choices": [], "usage": usage}
    assert [chunk["usage"] for chunk in before] == [None] * len(before)
    assert "completion_tokens_details" not in document(items())["usage"]


# --- reasoning ---------------------------------------------------------------------------------------


def test_reasoning_is_apart_from_content_under_both_names() -> None:
    output = items(delta(reasoning="Hm, "), delta(reasoning="yes."), delta("\n\nYes"), reasoning_tokens=2)
    assert entries(output) == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm, ", "reasoning": "Hm, "},
        {"reasoning_content": "yes.", "reasoning": "yes."},
        {"content": "\n\nYes"},
        {},
    ]
    message = {"role": "assistant", "content": "\n\nYes", "refusal": None}
    assert whole(output)["message"] == message | dict.fromkeys(("reasoning", "reasoning_content"), "Hm, yes.")
    assert document(output)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert whole(items(delta(reasoning="Hm")))["message"]["content"] == ""


# --- tool calls --------------------------------------------------------------------------------------


def test_a_call_is_named_once_and_then_gains_arguments() -> None:
    port = delta("", more(0, ' "Brest'), more(0, '"}'), begun(1, "g", "{}"))
    output = items(delta("", begun(0, "get_tide")), delta(), delta("", more(0, '{"port":')), port)
    function = {"name": "get_tide", "arguments": ""}
    other = {"index": 1, "id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    assert entries(output) == [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0, "id": "call_0", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"port":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "Brest"}'}}, other]},
        {},
    ]
    message = whole(output)["message"]
    function = {"name": "get_tide", "arguments": '{"port": "Brest"}'}
    assert message["content"] is None
    assert message["tool_calls"][0] == {"id": "call_0", "type": "function", "function": function}
    plain = items(delta("Hi"))
    assert not {"tool_calls", "reasoning"} & whole(plain)["message"].keys()


def test_clients_from_before_there_were_tools_get_one_call_of_a_function() -> None:
    calls = [delta("", begun(0, "get_tide", "{")), delta("", more(0, "}")), delta("", begun(1))]
    output = items(*calls, reason="tool_calls")
    choices = [chunk["choices"][0] for chunk in chunks(output, functions=True)]
    grown = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert grown == [{"name": "get_tide", "arguments": "{"}, {"arguments": "}"}]
    choice = whole(output, functions=True)
    assert choice["message"]["function_call"] == {"name": "get_tide", "arguments": "{}"}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == choices[-1]["finish_reason"] == "function_call"
    assert "tool_calls" not in str([choice, choices])


def test_growth_of_a_call_that_never_began_is_no_reason_to_fail() -> None:
    """Such deltas come from a faulty worker or a later version."""
    output = items(delta("", more(2**53, "x")))
    assert entries(output)[1] == {"tool_calls": [{"index": 2**53, "function": {"arguments": "x"}}]}
    assert whole(output)["message"]["tool_calls"] == [{"function": {"arguments": "x"}}]


TEXT = st.text(max_size=6)
GROWTHS = st.lists(st.tuples(TEXT, TEXT, st.none() | st.tuples(TEXT, TEXT, TEXT)), max_size=6)
"""Reasoning and text of each delta, and the call that begins in it: name and arguments, in two parts."""


@settings(max_examples=40)
@given(GROWTHS, st.booleans())
def test_the_chunks_joined_by_openais_client_are_the_document(growths: list[Any], at_once: bool) -> None:
    deltas, expected = [], []
    for reasoning, text, call in growths:
        first, rest = [], []
        if call is not None:
            name, *arguments = call
            first, rest = [begun(len(expected), name, arguments[0])], [more(len(expected), arguments[1])]
            expected.append((f"call_{len(expected)}", name, "".join(arguments)))
        whole_delta = [delta(text, *first, *rest, reasoning=reasoning)]
        deltas += whole_delta if at_once else [delta(text, *first, reasoning=reasoning), delta("", *rest)]
    output = items(*deltas)
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks(output):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    message = whole(output)["message"]
    joined = state.current_completion_snapshot.choices[0].message.model_dump()
    for name in ("content", "reasoning", "reasoning_content"):
        said = "".join(growth[1 if name == "content" else 0] for growth in growths)
        assert (joined.get(name) or "", message.get(name) or "") == (said, said)
    for calls in (joined.get("tool_calls") or [], message.get("tool_calls", [])):
        found = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
        assert found == expected


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", Code)
def test_every_error_has_the_shape_that_clients_know(code: Code) -> None:
    error = openai.failure(failed(code=code, message="Because.", param="n", details={"running": 2}))
    assert (error.code, error.retry_after_s is not None) == (code, KINDS[code].retryable)
    status = KINDS[code].status
    others = "rate_limit_error" if status == 429 else "invalid_request_error"
    kind = "server_error" if status >= 500 else others
    shape = {"message": "Because.", "type": kind, "param": "n", "code": code.value, "running": 2}
    assert openai.error_object(error) == {"error": shape} == json.loads(encode(openai.error_object(error)))
    with pytest.raises(RequestError, match=r"Because\."):
        streamed([failed(code=code, message="Because.")])


def test_a_failure_of_a_later_version_or_without_words_has_ours() -> None:
    assert openai.failure(failed(code="a_later_code")).code is Code.INTERNAL_ERROR
    assert openai.failure(failed(code="worker_crashed")).message == KINDS[Code.WORKER_CRASHED].wording
