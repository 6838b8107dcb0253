"""Chat dialect: validation of bodies, messages to the worker, and rendered answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dialects import chat, chat_body
from protocol.conversation import pack, unpack
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.types import Media, Sampling

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
    "a word": b"hello",
    "a second object": body() + b"{}",
    "NaN": b'{"messages": [], "temperature": NaN}',
    "bytes that are not UTF-8": body().replace(b"hello", b"\xff\xfe"),
    "UTF-16": body().decode().encode("utf-16"),
    "half an escaped pair": body().replace(b"hello", b"\\ud83d"),
    "deep arrays": b'{"messages": [], "metadata": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "deep objects": b'{"messages": [], "metadata": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
    "deep arrays in a field that is read": body().replace(
        b'{"messages"', b'{"chat_template_kwargs": {"a": ' + b"[" * 20_000 + b"]" * 20_000 + b'}, "messages"'
    ),
    "an array": b"[]",
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
    ({"messages": []}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hello"}]}, "messages[0].role"),
    (spoken(content=7), "messages[1].content"),
    (spoken(content=[{"type": "text", "text": "a"}, {"text": "a"}]), "messages[1].content[1].type"),
    (spoken(content=[{"type": "input_audio", "input_audio": {}}]), "messages[1].content[0].type"),
    (spoken(content=[{"type": "text"}]), "messages[1].content[0].text"),
    (spoken(content=[{"type": "image_url", "image_url": {}}]), "messages[1].content[0].image_url.url"),
    (spoken(content=[{"type": "image_url", "image_url": 1}]), "messages[1].content[0].image_url"),
    (spoken(name=1), "messages[1].name"),
    (called(), "messages[0].tool_calls[0].function"),
    (called(function={}), "messages[0].tool_calls[0].function.name"),
    (called(function={"name": "f", "arguments": 1}), "messages[0].tool_calls[0].function.arguments"),
    (
        {"messages": [*HELLO, {"role": "tool", "content": "4", "tool_call_id": ""}]},
        "messages[1].tool_call_id",
    ),
    ({"model": 7}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"max_tokens": "64"}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"seed": 1.5}, "seed"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ({"logit_bias": {"the": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1" * 400: 1}}, "logit_bias"),
    ({"logit_bias": {"５": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"n": 17}, "n"),
    ({"stop": 7}, "stop"),
    ({"stop": [7]}, "stop[0]"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": "x" * 1025}, "stop[0]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"tools": ["f"]}, "tools[0]"),
    (tool(), "tools[1].function"),
    (tool(function={}), "tools[1].function.name"),
    (tool(function={"name": "f", "parameters": []}), "tools[1].function.parameters"),
    (tool(function={"name": "f" * 257}), "tools[1].function.name"),
    (tool(function={"name": "f", "strict": "yes"}), "tools[1].function.strict"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"reasoning_effort": "utmost"}, "reasoning_effort"),
    ({"thinking_budget": 0}, "thinking_budget"),
    ({"chat_template_kwargs": {"thinking_budget": True}}, "chat_template_kwargs.thinking_budget"),
    ({"prediction": "text"}, "prediction"),
    ({"prediction": {"type": "content", "content": 7}}, "prediction.content"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_pin": 1}, "cache_pin"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{p}-{n}" for n, (_, p) in enumerate(WRONG)])
def test_a_field_of_the_wrong_kind_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(body(**fields))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)
    assert param in error.message
    assert len(error.message) < 300


# --- known fields that are not supported -------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f"}}]

ALLOWED = {"mode": "auto", "tools": TOOLS}

UNSERVED: list[tuple[dict[str, Any], str]] = [
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
        {"logprobs": False, "top_logprobs": 0},
        {"response_format": {"type": "text", "json_schema": None, "schema": None}},
        {"structured_outputs": {"json": None, "json_object": False, "disable_any_whitespace": False}},
        {"structural_tag": None},
        {"parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
        {"logit_bias": {}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "priority": 0},
        {"cache_salt": "", "cache_pin": False},
        {"tool_choice": "auto"},
    ],
    ids=str,
)
def test_default_valued_fields_are_accepted(fields: dict[str, Any]) -> None:
    assert sent(body(seed=1, **fields)) == sent(
        body(seed=1, **{k: v for k, v in fields.items() if k == "tools"})
    )


# --- ignored fields ----------------------------------------------------------------------------------


def test_null_means_absent_for_every_parameter_and_part_of_a_message() -> None:
    nulls = dict.fromkeys(name for name in chat_body.Body.__struct_fields__ if name != "messages")
    assert sent(body(**nulls | {"seed": 1})) == sent(body(seed=1))
    parts = dict.fromkeys(chat_body.Message.__struct_fields__) | {"role": "assistant"}
    assert sent(body(seed=1, messages=[parts])) == sent(body(seed=1, messages=[{"role": "assistant"}]))


def test_fields_that_nobody_knows_are_skipped_everywhere() -> None:
    extra = {"later": {"deep": [1, None, "x"]}, "metadata": None}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello", **extra}], **extra}]
    tools = [{"type": "function", "function": {"name": "f", "strict": False, **extra}, **extra}]
    with_extra = sent(body(seed=1, messages=messages, tools=tools, user="me", store=False, **extra))
    assert with_extra == sent(body(seed=1, tools=TOOLS))


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
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7, stop=["a", "b"], max_tokens=64,
        ignore_eos=True, speculation=False, prediction={"type": "content", "content": PREDICTED},
        tools=TOOLS, chat_template_kwargs={"style": "brief"}, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={"50256": -100, "7": 1.5}, logprobs=True, top_logprobs=20,
        priority=-3, cache_salt="駅" * 256, cache_pin=True,
    )  # fmt: skip
    media = [Media(frame=0, mime="image/png", sha256="00")]
    assert sent(raw, media) == Generate(
        incarnation="gateway",
        id="chatcmpl-1",
        sampling=Sampling(
            seed=7, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1,
            presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={50256: -100.0, 7: 1.5}, logprobs=20,
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
    )  # fmt: skip


def test_zero_is_a_choice_and_not_absence() -> None:
    sampling = sent(body(temperature=0, top_p=0, top_k=0, min_p=0, repetition_penalty=1, seed=0)).sampling
    assert sampling == Sampling(
        seed=0, temperature=0.0, top_p=0.0, top_k=0, min_p=0.0, repetition_penalty=1.0
    )


def test_the_newer_name_of_the_token_limit_wins_and_a_top_k_of_minus_one_is_off() -> None:
    generate = sent(body(max_tokens=5, max_completion_tokens=6, top_k=-1))
    assert (generate.max_tokens, generate.sampling.top_k) == (6, 0)


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
