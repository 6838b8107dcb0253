"""Answers of OpenAI's dialects with one or several choices, in streams and documents alike."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from broker.api.chat import chat
from broker.api.completions import completions
from broker.api.messages.answer import MessageDocumentRenderer, MessageSseRenderer, message
from broker.dialects import choices as answer
from broker.dialects import openai, renderers
from broker.dialects.body import encode
from broker.dialects.logprobs import LegacyLogprobs, chat_logprobs
from broker.dialects.parameters import copies, derived_seed
from broker.dispatch.flight import Batch, Item
from protocol.errors import KINDS, Code, RequestError
from protocol.types import CallDelta, Delta, Sampling, Timings, TokenLogprob, Usage
from tests import factories
from tests.factories import accepted, failed

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "org/m"}


finished = partial(factories.finished, prompt=5, tokens=2)
FORMS: dict[str, Callable[[int], answer.ChoiceRenderer]] = {
    "chat": lambda choices: chat.ChatChoiceRenderer(logprobs=True),
    "completions": lambda choices: completions.CompletionChoiceRenderer(logprobs=True, choices=choices),
}


DEEP = '{"a":' + "[" * 200_000
PLAIN = chat.ChatChoiceRenderer(logprobs=False)


def stream(
    form: answer.ChoiceRenderer, choices: int = 1, prompts: int = 1, *, include_usage: bool = True
) -> answer.ChoiceSseRenderer:
    return answer.ChoiceSseRenderer(
        HEAD.copy, form, choices=choices, prompts=prompts, include_usage=include_usage
    )


def whole(form: answer.ChoiceRenderer, choices: int = 1, prompts: int = 1) -> answer.ChoiceDocumentRenderer:
    return answer.ChoiceDocumentRenderer(HEAD.copy, form, choices=choices, prompts=prompts)


def scored(text: str, *likelihoods: TokenLogprob) -> Delta:
    return factories.delta(text, likelihoods=[*likelihoods])


def documents(sse: bytes) -> list[Any]:
    data = [event.removeprefix("data: ") for event in sse.decode().split("\n\n") if event[:1] == "d"]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


def items(*deltas: Delta, reason: str = "stop", **usage: int) -> list[Item]:
    counted = Usage(prompt_tokens=5, completion_tokens=len(deltas), **usage)
    return [factories.accepted(), *deltas, factories.finished(reason=reason, usage=counted)]


def delta(text: str = "", *calls: CallDelta, reasoning: str = "") -> Delta:
    return factories.delta(text, reasoning=reasoning, calls=[*calls])


def begun(index: int, name: str = "f", arguments: str = "") -> CallDelta:
    return CallDelta(index=index, id=f"call_{index}", name=name, arguments=arguments)


def more(index: int, arguments: str) -> CallDelta:
    return CallDelta(index=index, arguments=arguments)


def chunks(output: list[Item], *, include_usage: bool = False, functions: bool = False) -> list[Any]:
    """Return the chunks of a stream, without its end."""
    form = chat.ChatChoiceRenderer(logprobs=False, functions=functions)
    *events, done = documents(stream(form, include_usage=include_usage).feed([(0, output)]))
    assert done == "[DONE]"
    return events


def entries(output: list[Item]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks(output)]


def document(output: list[Item], *, functions: bool = False) -> Any:
    form = chat.ChatChoiceRenderer(logprobs=False, functions=functions)
    return json.loads(whole(form).feed([(0, output)]))


def choice_of(output: list[Item], *, functions: bool = False) -> Any:
    return document(output, functions=functions)["choices"][0]


# --- text and usage ----------------------------------------------------------------------------------


def test_a_stream_is_exactly_these_events() -> None:
    head = 'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"org/m"'
    tail = '"logprobs":null,"finish_reason":null}]}\n\n'
    output = items(delta("all "), delta(), delta("aboard"), reason="length")
    assert stream(PLAIN, include_usage=False).feed([(0, output)]).decode() == (
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
        {"role": "assistant", "content": ""}, {"reasoning_content": "Hm, ", "reasoning": "Hm, "},
        {"reasoning_content": "yes.", "reasoning": "yes."}, {"content": "\n\nYes"}, {},
    ]  # fmt: skip
    message = {"role": "assistant", "content": "\n\nYes", "refusal": None}
    assert choice_of(output)["message"] == message | dict.fromkeys(
        ("reasoning", "reasoning_content"), "Hm, yes."
    )
    assert document(output)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert choice_of(items(delta(reasoning="Hm")))["message"]["content"] == ""


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
    message = choice_of(output)["message"]
    function = {"name": "get_tide", "arguments": '{"port": "Brest"}'}
    assert message["content"] is None
    assert message["tool_calls"][0] == {"id": "call_0", "type": "function", "function": function}
    # A later version of the worker may tell of a call that never began.
    stray = items(delta("", more(2**53, "x")))
    assert entries(stray)[1] == {"tool_calls": [{"index": 2**53, "function": {"arguments": "x"}}]}
    assert "tool_calls" not in choice_of(stray)["message"]


@pytest.mark.parametrize("arguments", ["", '{"port": "Br', "[]", '{"port": 1}}', DEEP])
def test_a_call_that_broke_off_is_text_or_its_reason_says_so(arguments: str) -> None:
    broken = items(delta("Well, ", begun(0, "get_tide", arguments)), reason="stop")
    choice = choice_of(broken)
    assert choice["message"]["content"] == 'Well, {"name": "get_tide", "arguments": ' + arguments
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    cut = items(delta("Well, ", begun(0, "f", "{"), begun(1, "get_tide", arguments)), reason="length")
    message = choice_of(cut)["message"]
    assert message["content"] == 'Well, {"name": "f", "arguments": {'
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [arguments]
    assert chunks(cut)[-1]["choices"][0]["finish_reason"] == choice_of(cut)["finish_reason"] == "length"
    mixed = items(delta("", begun(0, "f", "{}"), begun(1, "get_tide", arguments)), reason="tool_calls")
    choice = choice_of(mixed)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
    assert choice["finish_reason"] == "tool_calls"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks(mixed)][-1] == "stop"


def test_clients_from_before_there_were_tools_get_one_call_of_a_function() -> None:
    calls = [delta("", begun(0, "get_tide", "{")), delta("", more(0, "}")), delta("", begun(1))]
    output = items(*calls, reason="tool_calls")
    choices = [chunk["choices"][0] for chunk in chunks(output, functions=True)]
    grown = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert grown == [{"name": "get_tide", "arguments": "{"}, {"arguments": "}"}]
    choice = choice_of(output, functions=True)
    assert choice["message"]["function_call"] == {"name": "get_tide", "arguments": "{}"}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == choices[-1]["finish_reason"] == "function_call"
    assert "tool_calls" not in str([choice, choices])


@pytest.mark.parametrize(("arguments", "told"), [('{"input": "a\\n"}', "a\n"), ('{"patch": "a"}', "a")])
def test_a_call_of_a_custom_tool_has_its_input_as_text(arguments: str, told: str) -> None:
    output = items(delta("", begun(0)), delta("", begun(1, "note")), delta("", more(1, arguments)))
    form = chat.ChatChoiceRenderer(logprobs=False, customs=frozenset({"note"}))
    *events, _ = documents(stream(form).feed([(0, output)]))
    [first, *others] = [
        event["choices"][0]["delta"]["tool_calls"][0] for event in events[2:] if "tool" in str(event)
    ]
    assert first == {"index": 1, "id": "call_1", "type": "custom", "custom": {"name": "note", "input": ""}}
    assert "".join(other["custom"]["input"] for other in others) == told
    made = json.loads(whole(form).feed([(0, output)]))["choices"][0]["message"]["tool_calls"]
    assert made[-1] == {"id": "call_1", "type": "custom", "custom": {"name": "note", "input": told}}


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
            name, *values = call
            written = json.dumps({"a": values})
            arguments = written[: len(written) // 2], written[len(written) // 2 :]
            first, rest = [begun(len(expected), name, arguments[0])], [more(len(expected), arguments[1])]
            expected.append((f"call_{len(expected)}", name, "".join(arguments)))
        whole_delta = [delta(text, *first, *rest, reasoning=reasoning)]
        deltas += whole_delta if at_once else [delta(text, *first, reasoning=reasoning), delta("", *rest)]
    output = items(*deltas)
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks(output):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    message = choice_of(output)["message"]
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
    for renderer in (stream(PLAIN, 2), whole(PLAIN, 2)):
        with pytest.raises(RequestError, match=r"Because\."):
            renderer.feed([(0, [accepted()]), (1, [failed(code=code, message="Because.")])])


def test_a_failure_of_a_later_version_or_without_words_has_ours() -> None:
    assert openai.failure(failed(code="a_later_code")).code is Code.INTERNAL_ERROR
    assert openai.failure(failed(code="worker_crashed")).message == KINDS[Code.WORKER_CRASHED].wording


# --- several choices ---------------------------------------------------------------------------------


def test_a_document_is_bounded_and_a_stream_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderers, "DOCUMENT_BYTES_MAX", 1000)
    head = message("msg_1", "m")
    chats: tuple[Any, ...] = (stream(PLAIN, 2), whole(PLAIN, 2), 1)
    for sse, document, second in (chats, (MessageSseRenderer(head), MessageDocumentRenderer(head), 0)):
        for renderer in (sse, document):
            for choice in (0, second):
                renderer.feed([(choice, [accepted(), scored("x" * 500)])])
        assert b"xxx" in sse.feed([(0, [scored("x" * 2000)])])
        with pytest.raises(RequestError, match="Set 'stream' to true") as caught:
            document.feed([(0, [scored("x")])])
        assert caught.value.kind.status == 500


@pytest.mark.parametrize("make", [stream, whole])
def test_usage_counts_each_prompt_once_and_every_answer(make: Any) -> None:
    form = completions.CompletionChoiceRenderer(logprobs=False, choices=4)
    ends = [
        finished(tokens=1, cached=0), finished(tokens=2, cached=4), finished(tokens=3, cached=6, prompt=7),
        finished(tokens=4, cached=6, prompt=7),
    ]  # fmt: skip
    sent = make(form, 4, prompts=2).feed([(choice, [end]) for choice, end in enumerate(ends)])
    document = json.loads(sent) if make is whole else documents(sent)[-2]
    assert document["usage"] == {
        "prompt_tokens": 12, "completion_tokens": 10, "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 6},
    }  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_one_failure_ends_a_stream_with_one_error_and_nothing_after_it(name: str) -> None:
    renderer = stream(FORMS[name](3), 3)
    assert renderer.feed([(0, [accepted(), scored("a")])])
    batches: list[Batch] = [(0, [scored("b")]), (1, [accepted(), failed()]), (2, [scored("c"), failed()])]
    *chunks, error, done = documents(renderer.feed(batches))
    assert [text_of(chunk["choices"][0]) for chunk in chunks if chunk["choices"]][:1] == ["b"]
    assert error["error"]["code"] == "engine_error"
    assert done == "[DONE]"
    assert renderer.over
    assert renderer.feed([(0, [scored("late"), finished()])]) == b""


# --- messages to the worker --------------------------------------------------------------------------


def test_copies_differ_in_id_and_seed_only_and_seeds_hardly_ever_meet() -> None:
    request = factories.request("x", sampling=Sampling(seed=7, top_k=3), stop=["a"])
    first, *others = copies(request, 16)
    assert first is request
    assert [other.id for other in others] == [f"x-{choice}" for choice in range(1, 16)]
    for choice, other in enumerate(others, 1):
        sampling = Sampling(seed=derived_seed(7, choice), top_k=3)
        assert other == replace(request, id=f"x-{choice}", sampling=sampling)
    assert derived_seed(7, 1) == 7631765994772377903
    seeds = [derived_seed(seed, choice) for seed in range(200) for choice in range(1, 16)]
    assert len({*seeds, *range(200)}) == len(seeds) + 200
    assert all(0 <= seed < 2**63 for seed in seeds)


# --- logprobs ----------------------------------------------------------------------------------------


def likely(spelled: bytes, logprob: float = -0.5, *top: tuple[bytes, float]) -> TokenLogprob:
    return TokenLogprob(bytes=spelled, logprob=logprob, top=[*top])


def test_an_entry_of_a_chat_has_text_bytes_and_the_likeliest() -> None:
    top = [
        {"token": " tea", "logprob": -0.125, "bytes": [32, 116, 101, 97]},
        {"token": " \\xf0\\x9f", "logprob": -3.0, "bytes": [32, 240, 159]},
    ]
    entry = {"token": " café", "logprob": -0.25, "bytes": [32, 99, 97, 102, 195, 169], "top_logprobs": top}
    likelihoods = [likely(b" caf\xc3\xa9", -0.25, (b" tea", -0.125), (b" \xf0\x9f", -3.0))]
    assert chat_logprobs(likelihoods) == {"content": [entry], "refusal": None}


def test_logprob_json_cannot_represent_becomes_the_minimum() -> None:
    for logprob in (-math.inf, math.nan, -1e30):
        [entry] = chat_logprobs([likely(b"a", logprob, (b"b", logprob))])["content"]
        assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
        assert LegacyLogprobs().take([likely(b"a", logprob)])["token_logprobs"] == [-9999.0]


def test_a_completion_has_four_lists_with_offsets_in_characters() -> None:
    logprobs = LegacyLogprobs()
    bear = "🐻".encode()
    tokens = [likely(b"ab", -1, (b"ab", -1), (b"x", -2)), likely(bear[:2]), likely(bear[2:]), likely(b"c")]
    first, second = logprobs.take(tokens[:2]), logprobs.take(tokens[2:])
    assert first == {
        "tokens": ["ab", "\\xf0\\x9f"], "token_logprobs": [-1, -0.5],
        "top_logprobs": [{"ab": -1, "x": -2}, {"\\xf0\\x9f": -0.5}], "text_offset": [0, 2],
    }  # fmt: skip
    assert (second["tokens"], second["text_offset"]) == (["\\x90\\xbb", "c"], [2, 3])


@pytest.mark.parametrize("name", FORMS)
def test_a_token_whose_text_is_held_is_reported_at_once_and_only_once(name: str) -> None:
    renderer = stream(FORMS[name](1))
    sse = renderer.feed([(0, [accepted(), scored("", likely(b"\xc3")), scored("é", likely(b"\xa9"))])])
    sse += renderer.feed([(0, [scored("!"), finished()])])
    choices = [chunk["choices"][0] for chunk in documents(sse)[:-1] if chunk["choices"]]
    told = [choice for choice in choices if choice["logprobs"]]
    assert [text_of(choice) for choice in told] == ["", "é"]
    assert "".join(map(text_of, choices)) == "é!"


pieces = st.lists(st.tuples(st.text("aé🐻", max_size=3), st.binary(max_size=4)), max_size=6)


@given(st.lists(pieces, min_size=1, max_size=3), st.data())
@settings(max_examples=50)
@pytest.mark.parametrize("name", FORMS)
def test_streamed_and_whole_answers_say_the_same(name: str, told: Any, data: st.DataObject) -> None:
    items = [
        [accepted(), *(scored(text, likely(spelled)) for text, spelled in choice), finished(reason="length")]
        for choice in told
    ]
    document = json.loads(whole(FORMS[name](len(told)), len(told)).feed(list(enumerate(items))))
    renderer, sse, rest = stream(FORMS[name](len(told)), len(told)), b"", [list(one) for one in items]
    while not renderer.over:
        choice = data.draw(st.sampled_from([n for n, left in enumerate(rest) if left]))
        count = data.draw(st.integers(1, len(rest[choice])))
        sse += renderer.feed([(choice, rest[choice][:count])])
        rest[choice] = rest[choice][count:]
    *chunks, usage, done = documents(sse)
    assert done == "[DONE]"
    assert usage["usage"] == document["usage"]
    for index, choice in enumerate(document["choices"]):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert name != "chat" or mine[0]["delta"]["role"] == "assistant"
        text = choice["message"]["content"] if name == "chat" else choice["text"]
        assert "".join(map(text_of, mine)) == text
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["length"]
        for field in choice["logprobs"].keys() - {"refusal"}:
            parts = [one["logprobs"][field] for one in mine if one["logprobs"]]
            assert [entry for part in parts for entry in part] == choice["logprobs"][field]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_the_last_chunk_has_the_timings_of_llama_cpp_and_the_model_that_continues(
    name: str, include_usage: bool
) -> None:
    usage = Usage(
        prompt_tokens=100, completion_tokens=40, cached_tokens=60, accepted_tokens=6, rejected_tokens=2
    )
    timings = Timings(queued_s=1.0, prefill_s=0.5, decode_s=2.0)
    end = finished(usage=usage, timings=timings, reason="length", continued_by='small, "alone"')
    items: list[Batch] = [(0, [accepted(), scored("a"), end])]
    renderer = stream(FORMS[name](1), include_usage=include_usage)
    *chunks, last, _ = documents(renderer.feed(items))
    document = json.loads(whole(FORMS[name](1)).feed(items))
    assert not any("timings" in chunk for chunk in chunks)
    assert last["timings"] == document["timings"] == {
        "cache_n": 60, "prompt_n": 40, "prompt_ms": 500.0, "prompt_per_token_ms": 12.5,
        "prompt_per_second": 80.0, "predicted_n": 40, "predicted_ms": 2000.0,
        "predicted_per_token_ms": 50.0, "predicted_per_second": 20.0, "draft_n": 8, "draft_n_accepted": 6,
    }  # fmt: skip
    [closing] = [chunk for chunk in (*chunks, last) if "continued_by" in chunk]
    assert closing["choices"][0]["finish_reason"] == "length"
    assert closing["continued_by"] == document["continued_by"] == 'small, "alone"'


def test_timings_are_left_out_where_they_are_not_known() -> None:
    items: list[Batch] = [(0, [accepted(), scored("a"), finished()])]
    document = json.loads(whole(FORMS["chat"](1)).feed(items))
    assert not {"timings", "continued_by"} & document.keys()
    timed = finished(timings=Timings(prefill_s=0.5))
    two: list[Batch] = [(0, [accepted(), timed]), (1, [accepted(), timed])]
    assert "timings" not in json.loads(whole(FORMS["chat"](2), 2).feed(two))
    instant = json.loads(whole(FORMS["chat"](1)).feed(two[:1]))
    assert instant["timings"]["predicted_per_second"] == 0.0
