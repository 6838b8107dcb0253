"""Chat dialect: validation of bodies, messages to the worker, and rendered answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dialects import answer, chat, chat_body, openai
from broker.dialects.body import encode
from broker.dialects.parts import Image
from broker.dispatch.flight import Item
from protocol.conversation import pack, unpack
from protocol.errors import KINDS, Code, RequestError
from protocol.messages import Failed, Finished, Generate
from protocol.types import Media, Sampling, Usage
from tests import factories
from tests.factories import accepted, failed

HELLO = [{"role": "user", "content": "hello"}]
PREDICTED = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def refusal(raw: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat_body.read(raw)
    return caught.value


def sent(raw: bytes, media: Sequence[Media] = ()) -> Generate:
    read = chat_body.read(raw)
    conversation = chat.conversation(read, system_in_place=False)
    return chat.generate(read, conversation.messages, [*media], id="chatcmpl-1", incarnation="gateway")


# --- bodies that are not JSON, or not chat bodies ------------------------------------------------------


NO_BODY = {
    "nothing": b"",
    "white space": b"  \n",
    "a word": b"hello",
    "an open object": b'{"messages": [',
    "a second object": body() + b"{}",
    "a trailing comma": b'{"messages": [],}',
    "single quotes": b"{'messages': []}",
    "NaN": b'{"messages": [], "temperature": NaN}',
    "Infinity": b'{"messages": [], "temperature": Infinity}',
    "bytes that are not UTF-8": body().replace(b"hello", b"\xff\xfe"),
    "UTF-16": body().decode().encode("utf-16"),
    "half an escaped pair": body().replace(b"hello", b"\\ud83d"),
    "a raw control character": body().replace(b"hello", b"\x00"),
    "deep arrays": b'{"messages": [], "metadata": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "deep objects": b'{"messages": [], "metadata": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
    "deep arrays in a field that is read": body().replace(
        b'{"messages"', b'{"chat_template_kwargs": {"a": ' + b"[" * 20_000 + b"]" * 20_000 + b'}, "messages"'
    ),
    "an array": b"[]",
    "null": b"null",
    "a number": b"7",
    "a string": b'"messages"',
}


@pytest.mark.parametrize("raw", NO_BODY.values(), ids=NO_BODY.keys())
def test_a_body_that_is_no_json_object_is_invalid(raw: bytes) -> None:
    error = refusal(raw)
    assert error.code is Code.INVALID_REQUEST
    assert error.param is None
    assert error.kind.status == 400


# --- fields of the wrong type ------------------------------------------------------------------------


def spoken(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "user", **fields}]}


def called(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", **fields}]}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "ok"}}, {"type": "function", **fields}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [{"content": "hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hello"}]}, "messages[0].role"),
    ({"messages": [{"role": None, "content": "hello"}]}, "messages[0].role"),
    ({"messages": [{"role": 1, "content": "hello"}]}, "messages[0].role"),
    (spoken(content=7), "messages[1].content"),
    (spoken(content={"type": "text", "text": "a"}), "messages[1].content"),
    (spoken(content=["a"]), "messages[1].content[0]"),
    (spoken(content=[{"type": "text", "text": "a"}, {"text": "a"}]), "messages[1].content[1].type"),
    (spoken(content=[{"type": "input_audio", "input_audio": {}}]), "messages[1].content[0].type"),
    (spoken(content=[{"type": None, "text": "a"}]), "messages[1].content[0].type"),
    (spoken(content=[{"type": "text"}]), "messages[1].content[0].text"),
    (spoken(content=[{"type": "text", "text": None}]), "messages[1].content[0].text"),
    (spoken(content=[{"type": "image_url"}]), "messages[1].content[0].image_url"),
    (spoken(content=[{"type": "image_url", "image_url": {}}]), "messages[1].content[0].image_url.url"),
    (
        spoken(content=[{"type": "image_url", "image_url": {"url": 1}}]),
        "messages[1].content[0].image_url.url",
    ),
    (spoken(content=[{"type": "image_url", "image_url": 1}]), "messages[1].content[0].image_url"),
    (spoken(name=1), "messages[1].name"),
    (called(), "messages[0].tool_calls[0].function"),
    (called(function=None), "messages[0].tool_calls[0].function"),
    (called(function={}), "messages[0].tool_calls[0].function.name"),
    (called(function={"name": 1}), "messages[0].tool_calls[0].function.name"),
    (called(function={"name": "f", "arguments": 1}), "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [*HELLO, {"role": "tool", "content": "4", "tool_call_id": ""}]},
        "messages[1].tool_call_id",
    ),
    ({"model": 7}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"max_tokens": "64"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 10.5}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"priority": 1.5}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": "3"}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"the": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias"),
    ({"logit_bias": {"1" * 400: 1}}, "logit_bias"),
    ({"logit_bias": {"５": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {"5": -101}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": "1"}, "n"),
    ({"stop": 7}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop": [7]}, "stop[0]"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", None]}, "stop[1]"),
    ({"stop": "x" * 1025}, "stop[0]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools[0]"),
    (tool(), "tools[1].function"),
    (tool(function=None), "tools[1].function"),
    (tool(function={}), "tools[1].function.name"),
    (tool(function={"name": "f", "parameters": []}), "tools[1].function.parameters"),
    (tool(function={"name": ""}), "tools[1].function.name"),
    (tool(function={"name": "f" * 257}), "tools[1].function.name"),
    (tool(function={"name": "f", "strict": "yes"}), "tools[1].function.strict"),
    (tool(type=7, function={"name": "f"}), "tools[1].type"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"enable_thinking": "no"}, "enable_thinking"),
    ({"reasoning_effort": "utmost"}, "reasoning_effort"),
    ({"thinking_budget": 0}, "thinking_budget"),
    ({"thinking_budget": 1.5}, "thinking_budget"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"chat_template_kwargs": {"thinking_budget": True}}, "chat_template_kwargs.thinking_budget"),
    ({"chat_template_kwargs": {"thinking_budget": 0}}, "chat_template_kwargs.thinking_budget"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"speculation": 1}, "speculation"),
    ({"prediction": "text"}, "prediction"),
    ({"prediction": {"type": "content", "content": 7}}, "prediction.content"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"cache_salt": ["a"]}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_pin": 1}, "cache_pin"),
    ({"cache_pin": "yes"}, "cache_pin"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{p}-{n}" for n, (_, p) in enumerate(WRONG)])
def test_a_field_of_the_wrong_kind_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(body(**fields))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)
    assert param in error.message
    assert len(error.message) < 300


def test_a_body_without_messages_says_so() -> None:
    error = refusal(b'{"model": "m"}')
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "messages")


def test_the_bounds_of_a_number_are_told_in_full() -> None:
    assert refusal(body(temperature=2.5)).message == "'temperature' must be between 0 and 2, not 2.5."
    assert refusal(body(max_tokens=0)).message == "'max_tokens' must be between 1 and 2147483648, not 0."


# --- known fields that are not supported -------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f"}}]

ALLOWED = {"mode": "auto", "tools": TOOLS}

UNSERVED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type"),
    ({"structural_tag": "{}"}, "structural_tag"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
        "structured_outputs.whitespace_pattern",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    ({"guided_json": {}, "guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
]


@pytest.mark.parametrize(("fields", "param"), UNSERVED, ids=[f"{p}-{n}" for n, (_, p) in enumerate(UNSERVED)])
def test_unsupported_parameter_is_refused(fields: dict[str, Any], param: str) -> None:
    error = refusal(body(**fields))
    assert (error.code, error.param) == (Code.UNSUPPORTED_PARAMETER, param)
    assert f"'{param}'" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"logprobs": False, "top_logprobs": 0},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text", "json_schema": None, "schema": None}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "disable_any_whitespace": False}},
        {"structural_tag": None},
        {"tools": TOOLS, "parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
        {"logit_bias": {}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "priority": 0},
        {"cache_salt": "", "cache_pin": False},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": [], "tool_choice": "none"},
        {"tool_choice": "auto"},
    ],
    ids=str,
)
def test_default_valued_fields_are_accepted(fields: dict[str, Any]) -> None:
    assert sent(body(seed=1, **fields)) == sent(
        body(seed=1, **{k: v for k, v in fields.items() if k == "tools"})
    )


# --- ignored fields ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f for f in chat_body.Body.__struct_fields__ if f != "messages"])
def test_null_means_absent_for_every_parameter(name: str) -> None:
    with_null = sent(body(seed=1, **{name: None}) if name != "seed" else body(seed=1))
    assert with_null == sent(body(seed=1))
    chat_body.read(body(**{name: None}))


@pytest.mark.parametrize("name", [f for f in chat_body.Message.__struct_fields__ if f != "role"])
def test_null_means_absent_for_every_part_of_a_message(name: str) -> None:
    message = {"role": "assistant", "content": "a"}
    with_null = sent(body(seed=1, messages=[message | {name: None}]))
    without = {k: v for k, v in message.items() if k != name}
    assert with_null == sent(body(seed=1, messages=[without]))


def test_fields_that_nobody_knows_are_skipped_everywhere() -> None:
    extra = {"later": {"deep": [1, None, "x"]}, "metadata": None}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello", **extra}], **extra}]
    tools = [{"type": "function", "function": {"name": "f", "strict": False, **extra}, **extra}]
    with_extra = sent(body(seed=1, messages=messages, tools=tools, user="me", store=False, **extra))
    assert with_extra == sent(body(seed=1, tools=TOOLS))


def test_tools_of_other_kinds_are_tolerated_and_not_offered() -> None:
    others = [{"type": "web_search", "filters": {}}, {"type": "custom", "custom": {"name": "x"}}]
    assert unpack(sent(body(tools=others))).tools is None
    assert unpack(sent(body(tools=[*others, *TOOLS]))).tools == TOOLS


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "function"])
def test_every_role_of_the_api_is_read(role: str) -> None:
    chat_body.read(body(messages=[{"role": role, "content": "a", "name": "n"}]))


# --- to the worker -----------------------------------------------------------------------------------


def test_a_bare_request_leaves_every_choice_to_the_model() -> None:
    message = sent(body())
    assert message == Generate(
        incarnation="gateway",
        id="chatcmpl-1",
        sampling=Sampling(seed=message.sampling.seed),
        messages=pack(HELLO),
    )


def test_every_parameter_arrives() -> None:
    raw = body(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=7,
        stop=["a", "b"],
        max_tokens=64,
        ignore_eos=True,
        speculation=False,
        prediction={"type": "content", "content": PREDICTED},
        tools=TOOLS,
        chat_template_kwargs={"style": "brief"},
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"50256": -100, "7": 1.5},
        logprobs=True,
        top_logprobs=20,
        priority=-3,
        cache_salt="駅" * 256,
        cache_pin=True,
    )
    media = [Media(frame=0, mime="image/png", sha256="00")]
    assert sent(raw, media) == Generate(
        incarnation="gateway",
        id="chatcmpl-1",
        sampling=Sampling(
            seed=7,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={50256: -100.0, 7: 1.5},
            logprobs=20,
        ),
        messages=pack(HELLO),
        tools=pack(TOOLS),
        template_kwargs=pack({"style": "brief"}),
        media=media,
        stop=["a", "b"],
        max_tokens=64,
        ignore_eos=True,
        speculation=False,
        prediction="ab",
        priority=-3,
        cache_salt="駅" * 256,
        cache_pin=True,
    )


def test_draft_token_counts_are_reported_in_usage() -> None:
    told = openai.usage_object(
        Usage(prompt_tokens=5, completion_tokens=9, accepted_tokens=6, rejected_tokens=2)
    )
    assert told["completion_tokens_details"] == {
        "accepted_prediction_tokens": 6,
        "rejected_prediction_tokens": 2,
    }
    assert "completion_tokens_details" not in openai.usage_object(Usage(prompt_tokens=5, completion_tokens=9))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
    ],
)
def test_how_many_likely_tokens_are_wanted(fields: dict[str, Any], expected: int | None) -> None:
    assert sent(body(**fields)).sampling.logprobs == expected


def test_zero_is_a_choice_and_not_absence() -> None:
    sampling = sent(body(temperature=0, top_p=0, top_k=0, min_p=0, repetition_penalty=1, seed=0)).sampling
    assert sampling == Sampling(
        seed=0, temperature=0.0, top_p=0.0, top_k=0, min_p=0.0, repetition_penalty=1.0
    )


def test_a_top_k_of_minus_one_is_off() -> None:
    assert sent(body(top_k=-1)).sampling.top_k == 0


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert sent(body(max_tokens=5)).max_tokens == 5
    assert sent(body(max_completion_tokens=6)).max_tokens == 6
    assert sent(body(max_tokens=5, max_completion_tokens=6)).max_tokens == 6


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    seeds = {sent(body()).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(st.integers(-(2**63), 2**63 - 1))
def test_any_seed_of_the_api_fits_the_wire_and_is_kept_apart_from_its_neighbours(seed: int) -> None:
    carried = sent(body(seed=seed)).sampling.seed
    assert 0 <= carried < 2**63
    assert carried == (seed if seed >= 0 else seed + 2**63)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"enable_thinking": True, "chat_template_kwargs": {"a": 1}}, {"enable_thinking": True, "a": 1}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "enable_thinking": True},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_thinking_is_asked_of_the_template(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert unpack(sent(body(**fields))).options == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"thinking_budget": 3}, 3),
        ({"thinking_token_budget": 4}, 4),
        ({"chat_template_kwargs": {"thinking_budget": 5}, "thinking_budget": 3}, 5),
    ],
)
def test_a_thinking_budget_is_taken_under_each_of_its_names(
    fields: dict[str, Any], expected: int | None
) -> None:
    assert sent(body(**fields)).thinking_budget == expected


def test_tools_are_offered_with_what_they_have_unless_none_may_be_called() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {}}}}
    tools = [{"type": "function", "function": function}, {"function": {"name": "g", "description": None}}]
    offered = [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "g"}},
    ]
    assert unpack(sent(body(tools=tools))).tools == offered
    assert unpack(sent(body(tools=tools, tool_choice="auto"))).tools == offered
    assert unpack(sent(body(tools=tools, tool_choice="none"))).tools is None


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, []), ([], []), ("a", ["a"]), (["a", "\n\n"], ["a", "\n\n"]), ("x" * 1024, ["x" * 1024])],
)
def test_stop_comes_in_several_forms(stop: object, expected: list[str]) -> None:
    assert sent(body(stop=stop)).stop == expected


def test_the_conversation_arrives_in_its_canonical_form() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "what is this?"}, image]},
        {"role": "developer", "content": "Be brief."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "a cat"},
    ]
    read = chat_body.read(body(messages=messages))
    conversation = chat.conversation(read, system_in_place=False)
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "tool"]
    assert conversation.messages[1]["content"][1] == {"type": "image"}
    assert conversation.attachments == (Image("data:image/png;base64,AA==", "messages[0].content[1]", "low"),)
    assert conversation.messages[2]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"x": 1}}
    in_place = chat.conversation(read, system_in_place=True)
    assert [m["role"] for m in in_place.messages] == ["user", "system", "assistant", "tool"]


def test_whether_to_stream_is_read_from_the_body() -> None:
    assert not chat_body.read(body()).stream
    assert not chat_body.read(body(stream=False, stream_options={"include_usage": False})).include_usage
    read = chat_body.read(body(stream=True, stream_options={"include_usage": True}))
    assert (read.stream, read.include_usage) == (True, True)


# --- to the client: streamed -------------------------------------------------------------------------

finished = partial(factories.finished, prompt=5, tokens=2, cached=3)
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 3},
}


def deltas(*texts: str) -> list[Item]:
    return [factories.delta(text, sequence=n, tokens=[n]) for n, text in enumerate(texts)]


class OneChoice:
    """Renderer of an answer with one choice, fed with that choice's items."""

    def __init__(self, renderer: answer.ChoiceSseRenderer | answer.ChoiceDocumentRenderer) -> None:
        self._renderer = renderer

    def feed(self, items: Sequence[Item]) -> bytes:
        sent = self._renderer.feed([(0, [*items])])
        assert not items or self._renderer.over == isinstance(items[-1], Finished | Failed)
        return sent


def envelope(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1700000000, "model": "org/m"}


def stream(include_usage: bool = False) -> OneChoice:
    form, head = chat.ChatChoiceRenderer(logprobs=False), envelope("chat.completion.chunk")
    return OneChoice(answer.ChoiceSseRenderer(head.copy, form, choices=1, include_usage=include_usage))


def whole() -> OneChoice:
    return OneChoice(
        answer.ChoiceDocumentRenderer(
            envelope("chat.completion").copy, chat.ChatChoiceRenderer(logprobs=False), choices=1
        )
    )


def documents(sse: bytes) -> list[Any]:
    """Return the parsed data of each event. Asserts that each event is well formed."""
    assert sse.endswith(b"\n\n") or not sse
    found = []
    for event in sse.decode().split("\n\n")[:-1]:
        assert event.startswith("data: ")
        assert "\n" not in event
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def test_a_stream_is_exactly_these_events() -> None:
    head = 'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"org/m"'
    tail = '"logprobs":null,"finish_reason":null}]}\n\n'
    expected = (
        f'{head},"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},{tail}'
        f'{head},"choices":[{{"index":0,"delta":{{"content":"all "}},{tail}'
        f'{head},"choices":[{{"index":0,"delta":{{"content":"aboard"}},{tail}'
        f'{head},"choices":[{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"length"}}]}}\n\n'
        "data: [DONE]\n\n"
    )
    items = [accepted(), *deltas("all ", "aboard"), finished(reason="length")]
    assert stream().feed(items).decode() == expected


def test_a_stream_with_usage_ends_with_one_more_chunk() -> None:
    *chunks, usage, done = documents(stream(True).feed([accepted(), *deltas("a"), finished()]))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == USAGE
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert {chunk["id"] for chunk in (*chunks, usage)} == {"chatcmpl-1"}


def test_a_stream_that_was_not_asked_for_usage_has_none() -> None:
    *chunks, _ = documents(stream().feed([accepted(), *deltas("a"), finished()]))
    assert all("usage" not in chunk for chunk in chunks)


def test_a_token_without_text_is_no_event() -> None:
    renderer = stream()
    renderer.feed([accepted()])
    assert renderer.feed(deltas("", "")) == b""


def test_events_come_as_items_come() -> None:
    items = [accepted(), *deltas("a", "", "b"), finished()]
    at_once, one_by_one = stream(True), stream(True)
    assert b"".join(one_by_one.feed([item]) for item in items) == at_once.feed(items)


TEXTS = [
    '"',
    "\\",
    "\n\n",
    "\r\n",
    "\x00\x1f\x7f",
    "\u2028\u2029",
    "🚂",
    "é",
    "駅",
    "data: [DONE]\n\n",
    "</s>",
]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_text_is_escaped_so_that_it_arrives_as_it_was(text: str) -> None:
    chunk, chunk2, *_ = documents(stream().feed([accepted(), *deltas(text), finished()]))
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk2["choices"][0]["delta"] == {"content": text}
    document = json.loads(whole().feed([accepted(), *deltas(text), finished()]))
    assert document["choices"][0]["message"]["content"] == text


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=12),
    st.lists(st.integers(1, 4)),
)
@settings(max_examples=300, deadline=None)
def test_the_parts_of_a_stream_join_to_the_text_of_a_whole_answer(texts: list[str], cuts: list[int]) -> None:
    items: list[Item] = [accepted(), *deltas(*texts), finished()]
    renderer, sse, rest = stream(), b"", items
    for cut in [*cuts, len(items)]:
        sse += renderer.feed(rest[:cut])
        rest = rest[cut:]
    *chunks, done = documents(sse)
    assert done == "[DONE]"
    joined = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert joined == "".join(texts)
    document = json.loads(whole().feed(items))
    assert document["choices"][0]["message"]["content"] == joined
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


# --- to the client: errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("items", [[failed()], [accepted(), failed()], [accepted(), *deltas("a"), failed()]])
@pytest.mark.parametrize("make", [stream, whole])
def test_an_error_before_anything_was_sent_is_raised_with_its_status(make: Any, items: list[Item]) -> None:
    with pytest.raises(RequestError) as caught:
        make().feed(items)
    assert caught.value.code is Code.ENGINE_ERROR


def test_an_error_after_the_stream_began_is_an_event_followed_by_done() -> None:
    renderer = stream()
    assert renderer.feed([accepted(), *deltas("a")])
    message, done = documents(
        renderer.feed([*deltas("b")[:0], failed(code="worker_crashed", message="It died.")])
    )
    assert message == {
        "error": {"message": "It died.", "type": "server_error", "param": None, "code": "worker_crashed"}
    }
    assert done == "[DONE]"


def test_a_whole_answer_that_fails_late_has_no_text() -> None:
    renderer = whole()
    assert renderer.feed([accepted(), *deltas("a")]) == b""
    with pytest.raises(RequestError):
        renderer.feed([failed()])


@pytest.mark.parametrize("code", Code)
def test_flight_failure_maps_to_client_error(code: Code) -> None:
    error = openai.failure(failed(code=code, message="Because.", param="messages"))
    assert (error.code, error.message, error.param) == (code, "Because.", "messages")
    assert (error.retry_after_s is not None) == KINDS[code].retryable


def test_a_failure_without_words_gets_those_of_the_table() -> None:
    assert openai.failure(failed(code="worker_crashed")).message == KINDS[Code.WORKER_CRASHED].wording


def test_a_code_of_a_later_version_is_an_internal_error() -> None:
    assert openai.failure(failed(code="a_later_code")).code is Code.INTERNAL_ERROR


@pytest.mark.parametrize("code", Code)
def test_an_error_has_the_shape_that_clients_know(code: Code) -> None:
    error = RequestError(code, "Because.", param="n", details={"running": 2})
    status = KINDS[code].status
    others = "rate_limit_error" if status == 429 else "invalid_request_error"
    kind = "server_error" if status >= 500 else others
    assert openai.error_object(error) == {
        "error": {"message": "Because.", "type": kind, "param": "n", "code": code.value, "running": 2}
    }
    assert json.loads(encode(openai.error_object(error))) == openai.error_object(error)


# --- to the client: document -------------------------------------------------------------------------


def test_a_whole_answer_is_exactly_this_document() -> None:
    renderer = whole()
    assert renderer.feed([accepted()]) == b""
    assert renderer.feed(deltas("all ", "aboard")) == b""
    assert json.loads(renderer.feed([finished()])) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "org/m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "all aboard", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def test_an_answer_without_text_is_an_empty_string() -> None:
    document = json.loads(whole().feed([accepted(), *deltas(""), finished(reason="length")]))
    assert document["choices"][0]["message"]["content"] == ""
    assert document["choices"][0]["finish_reason"] == "length"
