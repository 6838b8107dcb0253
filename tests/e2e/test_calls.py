"""Tool calls over HTTP by the scripted worker, which calls the tool `note` as often as its prompt says."""

from __future__ import annotations

import json
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageFunctionToolCall

from tests.dialects import tool

NOTE = tool("chat", "note", "words")
THREE = "!think=3 !call=3 !tokens=30"
"""Three reasoning tokens, two words, three calls of five tokens each, and ten more words."""


def whole(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.chat.completions.create(**asked(text), **fields)


def streamed(client: openai.OpenAI, text: str, **fields: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(**asked(text), stream=True, **fields))


def asked(text: str) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "tools": [NOTE]}


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    read = []
    for call in message.tool_calls or []:
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert (call.type, bool(call.id)) == ("function", True)
        read.append((call.function.name, json.loads(call.function.arguments)))
    return read


def test_streamed_and_whole_are_the_same_calls_with_arguments_that_parse(client: openai.OpenAI) -> None:
    choice = whole(client, THREE).choices[0]
    calls, message = calls_of(choice.message), choice.message
    assert [name for name, _ in calls] == ["note"] * 3
    assert [len(arguments["words"].split()) for _, arguments in calls] == [4, 4, 4]
    assert len({call.id for call in message.tool_calls}) == 3
    assert len(message.content.split()) == 12
    chunks = streamed(client, THREE)
    entries = [entry for chunk in chunks for entry in chunk.choices[0].delta.tool_calls or []]
    assert [entry.index for entry in entries] == [0] * 5 + [1] * 5 + [2] * 5
    named = [entry for entry in entries if entry.id or entry.type or (entry.function and entry.function.name)]
    assert named == entries[::5]
    joined = ["", "", ""]
    for entry in entries:
        joined[entry.index] += (entry.function and entry.function.arguments) or ""
    assert joined == [call.function.arguments for call in message.tool_calls]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason == "tool_calls"


def test_call_that_max_tokens_cuts_has_its_arguments_so_far(client: openai.OpenAI) -> None:
    choice = whole(client, THREE, max_tokens=8).choices[0]
    [call] = choice.message.tool_calls
    deltas = [chunk.choices[0].delta for chunk in streamed(client, THREE, max_tokens=8)]
    fragments = [entry.function.arguments or "" for delta in deltas for entry in delta.tool_calls or []]
    assert choice.finish_reason == "length"
    assert call.function.arguments == "".join(fragments)
    assert len(call.function.arguments.split()) == 3


def test_the_stream_helper_of_openais_client_parses_the_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**asked(THREE), tool_choice="required") as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert events.count("tool_calls.function.arguments.done") == 3
    parsed = [call.function.parsed_arguments for call in message.tool_calls or []]
    assert [len(arguments["words"].split()) for arguments in parsed if isinstance(arguments, dict)] == [4] * 3


def test_functions_are_called_as_they_were_before_there_were_tools(client: openai.OpenAI) -> None:
    said: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "!call=1 !tokens=8"}]}
    said |= {"functions": [NOTE["function"]], "seed": 5}
    choice = client.chat.completions.create(**said).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call.name == "note"
    assert json.loads(choice.message.function_call.arguments).keys() == {"words"}
    assert choice.message.tool_calls is None
    grown = [
        chunk.choices[0].delta.function_call
        for chunk in client.chat.completions.create(**said, stream=True)
        if chunk.choices[0].delta.function_call
    ]
    assert [call.name for call in grown if call.name] == ["note"]
    assert "".join(call.arguments or "" for call in grown) == choice.message.function_call.arguments
