"""Tool calls in chat answers: a name, then fragments of arguments, in streams and documents."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from broker.dialects import answer, chat
from broker.dispatch.flight import Item
from protocol.types import CallDelta, Delta, TokenLogprob
from tests import factories

HEAD = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1700000000, "model": "org/m"}


def items(*deltas: Delta, reason: str = "tool_calls") -> list[Item]:
    return [factories.accepted(), *deltas, factories.finished(tokens=len(deltas), prompt=5, reason=reason)]


def delta(text: str = "", *calls: CallDelta, reasoning: str = "", likely: bool = False) -> Delta:
    likelihoods = [TokenLogprob(bytes=text.encode(), logprob=-0.5)] if likely else []
    return factories.delta(text, reasoning=reasoning, calls=[*calls], likelihoods=likelihoods)


def begun(index: int, name: str = "f", arguments: str = "") -> CallDelta:
    return CallDelta(index=index, id=f"call_{index}", name=name, arguments=arguments)


def more(index: int, arguments: str) -> CallDelta:
    return CallDelta(index=index, arguments=arguments)


def chunks(said: list[Item], *, logprobs: bool = False, functions: bool = False) -> list[dict[str, Any]]:
    form = chat.ChatChoiceRenderer(logprobs=logprobs, functions=functions)
    stream = answer.ChoiceSseRenderer(HEAD.copy, form, choices=1, include_usage=False)
    events = stream.feed([(0, said)]).decode().split("\n\n")[:-2]
    return [json.loads(event.removeprefix("data: ")) for event in events]


def entries(said: list[Item]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks(said)]


def whole(said: list[Item]) -> dict[str, Any]:
    renderer = answer.ChoiceDocumentRenderer(HEAD.copy, chat.ChatChoiceRenderer(logprobs=False), choices=1)
    choice: dict[str, Any] = json.loads(renderer.feed([(0, said)]))["choices"][0]
    return choice


def test_clients_from_before_there_were_tools_get_one_call_of_a_function() -> None:
    said = items(delta("", begun(0, "get_tide", "{")), delta("", more(0, "}")), delta("", begun(1)))
    told = [chunk["choices"][0] for chunk in chunks(said, functions=True)]
    grown = [choice["delta"]["function_call"] for choice in told if "function_call" in choice["delta"]]
    assert grown == [{"name": "get_tide", "arguments": "{"}, {"arguments": "}"}]
    assert not any("tool_calls" in choice["delta"] for choice in told)
    assert told[-1]["finish_reason"] == "function_call"
    renderer = answer.ChoiceDocumentRenderer(
        HEAD.copy, chat.ChatChoiceRenderer(logprobs=False, functions=True), choices=1
    )
    (choice,) = json.loads(renderer.feed([(0, said)]))["choices"]
    assert choice["message"]["function_call"] == {"name": "get_tide", "arguments": "{}"}
    assert choice["message"]["content"] is None
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"


def test_a_call_is_named_once_and_then_gains_arguments() -> None:
    said = items(
        delta("", begun(0, "get_tide")),
        delta(),
        delta("", more(0, '{"port":')),
        delta("", more(0, ' "Brest"}')),
    )
    function = {"name": "get_tide", "arguments": ""}
    assert entries(said) == [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0, "id": "call_0", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"port":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "Brest"}'}}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks(said)] == [None] * 4 + ["tool_calls"]
    choice = whole(said)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "get_tide", "arguments": '{"port": "Brest"}'},
            }
        ],
    }


def test_reasoning_and_content_accompany_tool_calls() -> None:
    said = items(delta(reasoning="Hm."), delta("Let me see.", begun(0, arguments="{}")), delta("Done."))
    assert entries(said)[2] == {
        "content": "Let me see.",
        "tool_calls": [
            {"index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
    message = whole(said)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Let me see.Done.")
    assert len(message["tool_calls"]) == 1


def test_a_chunk_has_one_entry_for_a_call_whatever_it_gained() -> None:
    said = items(
        delta("", begun(0), more(0, "{"), more(0, "}"), begun(1, "g"), more(1, "{}")),
        delta("", begun(2, "h", "{}")),
    )
    (first, second), (third,) = (entry["tool_calls"] for entry in entries(said)[1:3])
    assert (first["index"], first["function"]) == (0, {"name": "f", "arguments": "{}"})
    assert (second["index"], second["function"]) == (1, {"name": "g", "arguments": "{}"})
    assert (third["index"], third["function"]) == (2, {"name": "h", "arguments": "{}"})


def test_a_call_that_was_cut_short_is_told_as_far_as_it_came() -> None:
    choice = whole(items(delta("", begun(0, arguments='{"po')), reason="length"))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"po'


def test_an_answer_without_calls_does_not_speak_of_them() -> None:
    said = items(delta("Hi"), reason="stop")
    assert "tool_calls" not in json.dumps([chunks(said), whole(said)])
    assert whole(items(delta(), reason="stop"))["message"]["content"] == ""


def test_log_probabilities_stay_with_the_content_beside_a_call() -> None:
    choice = chunks(items(delta("a", begun(0), likely=True)), logprobs=True)[1]["choices"][0]
    assert choice["delta"]["content"] == "a"
    assert choice["delta"]["tool_calls"][0]["id"] == "call_0"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a"]


def test_growth_of_a_call_that_never_began_is_no_reason_to_fail() -> None:
    """Such deltas come from a faulty worker or a later version."""
    said = items(delta("", more(2**53, "x")))
    assert entries(said)[1] == {"tool_calls": [{"index": 2**53, "function": {"arguments": "x"}}]}
    assert whole(said)["message"]["tool_calls"] == [{"function": {"arguments": "x"}}]


# --- any calls, however chunked ----------------------------------------------------------------------

TEXT = st.text(max_size=6)
WHOLE = st.lists(st.tuples(TEXT, TEXT, st.text(max_size=12)), max_size=4)


def growths(calls: list[tuple[str, str, str]], cuts: list[bool], dice: list[int]) -> list[Delta]:
    """Return deltas of each call: the text before it, its name, and its arguments in pieces."""
    pieces: list[str | CallDelta] = []
    for index, (text, name, arguments) in enumerate(calls):
        pieces += [text, begun(index, name)]
        while arguments:
            length = 1 + dice[len(arguments) % len(dice)]
            pieces.append(more(index, arguments[:length]))
            arguments = arguments[length:]
    deltas = [delta()]
    for number, piece in enumerate(pieces):
        last = deltas[-1]
        # Within a delta, text precedes calls.
        if cuts[number % len(cuts)] or (isinstance(piece, str) and last.calls):
            deltas.append(delta())
        grown = deltas[-1]
        if isinstance(piece, str):
            deltas[-1] = delta(grown.text + piece, *grown.calls)
        else:
            deltas[-1] = delta(grown.text, *grown.calls, piece)
    return deltas


@given(WHOLE, st.lists(st.booleans(), min_size=1), st.lists(st.integers(0, 4), min_size=1))
def test_the_chunks_joined_by_openais_client_are_the_document(
    calls: list[tuple[str, str, str]], cuts: list[bool], dice: list[int]
) -> None:
    said = items(*growths(calls, cuts, dice))
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks(said):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk | {"object": "chat.completion.chunk"}))
    streamed, message = state.current_completion_snapshot.choices[0].message, whole(said)["message"]
    assert (streamed.content or None) == (message["content"] or None)
    for heard in (streamed.tool_calls or [], message.get("tool_calls", [])):
        read = [call if isinstance(call, dict) else call.model_dump() for call in heard]
        assert [(call["id"], call["type"], call["function"]["name"]) for call in read] == [
            (f"call_{index}", "function", name) for index, (_, name, _) in enumerate(calls)
        ]
        assert [call["function"]["arguments"] for call in read] == [arguments for _, _, arguments in calls]
