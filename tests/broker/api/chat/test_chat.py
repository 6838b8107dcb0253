"""Chat dialect: validation of bodies, tools, assistant prefill, and messages to the worker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.api.chat import body as chat_body
from broker.api.chat import chat
from protocol.conversation import BEFORE_TURN, IN_MESSAGE, PROMPT_ENDS, pack, unpack
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.types import Media, Sampling
from protocol.types import ToolCallConstraint as Calling

HELLO = [{"role": "user", "content": "hello"}]
PREDICTED = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
MEDIA = [Media(frame=0, mime="image/png", sha256="00")]

F, G = ({"type": "function", "function": {"name": name}} for name in "fg")
STRICT = {"type": "function", "function": {"name": "s", "strict": True, "parameters": {"type": "object"}}}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
SEARCH = {"type": "web_search", "filters": {}}


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def generated(raw: bytes, media: list[Media]) -> Generate:
    read = chat_body.read(raw)
    messages = chat.conversation(read, system_in_place=False).messages
    return chat.generate(read, messages, media, id="chatcmpl-1", incarnation="gateway")


def sent(media: list[Media] | None = None, **fields: Any) -> Generate:
    return generated(body(**fields), media or [])


def refusal(raw: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        generated(raw, [])
    return caught.value


# --- refused bodies ----------------------------------------------------------------------------------

NO_BODY = {
    "nothing": b"", "a second object": body() + b"{}", "NaN": b'{"temperature": NaN, "messages": []}',
    "bytes that are not UTF-8": body().replace(b"hello", b"\xff\xfe"),
    "half an escaped pair": body().replace(b"hello", b"\\ud83d"),
    "deep arrays": b'{"messages": [], "metadata": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "deep objects": b'{"messages": [], "metadata": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
    "an array": b"[]",
}  # fmt: skip


@pytest.mark.parametrize("raw", NO_BODY.values(), ids=NO_BODY.keys())
def test_a_body_that_is_no_json_object_is_invalid(raw: bytes) -> None:
    error = refusal(raw)
    assert (error.code, error.param, error.kind.status) == (Code.INVALID_REQUEST, None, 400)


def spoken(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "user", **fields}]}


def called(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", **fields}]}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [F, {"type": "function", **fields}]}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


def begun(**fields: Any) -> dict[str, Any]:
    """Fields of a request that continues a message of the assistant."""
    message = {"role": "assistant", "content": "La, ", **fields}
    return {"messages": [*HELLO, message], "continue_final_message": True}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "hello"}]}, "messages[0].role"),
    (spoken(content=7), "messages[1].content"),
    (spoken(content=[{"type": "text", "text": "a"}, {"text": "a"}]), "messages[1].content[1].type"),
    (spoken(content=[{"type": "text"}]), "messages[1].content[0].text"),
    (spoken(content=[{"type": "image_url", "image_url": {}}]), "messages[1].content[0].image_url.url"),
    (spoken(content=[{"type": "image_url", "image_url": 1}]), "messages[1].content[0].image_url"),
    (called(), "messages[0].tool_calls[0].function"),
    (called(type="custom"), "messages[0].tool_calls[0].custom"),
    (spoken(content=[{"type": "thinking", "thinking": "a"}]), "messages[1]"),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
    (called(function={"name": "f", "arguments": 1}), "messages[0].tool_calls[0].function.arguments"),
    (spoken(role="tool", content="4", tool_call_id=""), "messages[1].tool_call_id"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"seed": 1.5}, "seed"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1" * 400: 1}}, "logit_bias"),
    ({"logit_bias": {"５": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"n": 17}, "n"),
    ({"stop": [7]}, "stop[0]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    (tool(), "tools[1].function"),
    (tool(function={"name": "f", "parameters": []}), "tools[1].function.parameters"),
    (tool(function={"name": "f" * 257}), "tools[1].function.name"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"prediction": {"type": "content", "content": 7}}, "prediction.content"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    ({"functions": [{"name": ""}]}, "functions[0].name"),
    ({"functions": [{"name": "f"}], "tools": [F]}, "functions"),
    ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [F], "tool_choice": allowed("required")}, "tool_choice"),
    ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [F], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [F], "tool_choice": named("nope")}, "tool_choice.function.name"),
    ({"tools": [F], "tool_choice": {"type": "function", "name": "nope"}}, "tool_choice.name"),
    ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [F], "tool_choice": allowed("sometimes")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [F], "tool_choice": allowed("auto", named("f"), named("nope"))},
     "tool_choice.allowed_tools.tools[1].function.name"),
    ({"continue_final_message": True}, "continue_final_message"),
    (begun() | {"add_generation_prompt": True}, "continue_final_message"),
    (begun(content=""), "continue_final_message"),
    (begun(tool_calls=[CALL]), "continue_final_message"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{p}-{n}" for n, (_, p) in enumerate(WRONG)])
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(body(**fields))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)
    assert param in error.message
    assert len(error.message) < 300


# --- ignored fields ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": False, "top_logprobs": 0, "logit_bias": {}, "cache_salt": "", "cache_pin": False},
        {"response_format": {"type": "text", "json_schema": None, "schema": None}},
        {"structured_outputs": {"json": None, "json_object": False, "disable_any_whitespace": False}},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "priority": 0},
        {name: None for name in chat_body.Body.__struct_fields__ if name not in ("messages", "seed")},
        {"messages": [dict.fromkeys(chat_body.Message.__struct_fields__) | HELLO[0]]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_default_values_and_nulls_mean_absence(fields: dict[str, Any]) -> None:
    assert sent(seed=1, **fields) == sent(seed=1)


def test_fields_that_nobody_knows_are_skipped_everywhere() -> None:
    extra = {"later": {"deep": [1, None, "x"]}, "metadata": None}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello", **extra}], **extra}]
    tools = [{"type": "function", "function": {"name": "f", "strict": False, **extra}, **extra}]
    with_extra = sent(seed=1, messages=messages, tools=tools, user="me", store=False, **extra)
    assert with_extra == sent(seed=1, tools=[F])


# --- to the worker -----------------------------------------------------------------------------------


def test_a_bare_request_leaves_every_choice_to_the_model_and_gets_a_seed_of_its_own() -> None:
    messages = [sent() for _ in range(8)]
    seeds = {message.sampling.seed for message in messages}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    sampling = Sampling(seed=messages[0].sampling.seed)
    assert messages[0] == Generate(
        incarnation="gateway", id="chatcmpl-1", sampling=sampling, messages=pack(HELLO)
    )


def test_every_parameter_arrives() -> None:
    message = sent(
        MEDIA, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7, stop=["a", "b"], max_tokens=64,
        ignore_eos=True, speculation=False, prediction={"type": "content", "content": PREDICTED},
        tools=[F], chat_template_kwargs={"style": "brief"}, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={"50256": -100, "7": 1.5}, logprobs=True, top_logprobs=20,
        priority=-3, cache_salt="駅" * 256, cache_pin=True,
    )  # fmt: skip
    assert message == Generate(
        incarnation="gateway", id="chatcmpl-1",
        sampling=Sampling(
            seed=7, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1,
            presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={50256: -100.0, 7: 1.5}, logprobs=20,
        ),
        messages=pack(HELLO), tools=pack([F]), template_kwargs=pack({"style": "brief"}), media=MEDIA,
        stop=["a", "b"], max_tokens=64, ignore_eos=True, speculation=False, prediction="ab", priority=-3,
        cache_salt="駅" * 256, cache_pin=True,
    )  # fmt: skip


def test_zero_is_a_choice_a_top_k_of_minus_one_is_off_and_the_newer_token_limit_wins() -> None:
    sampling = sent(temperature=0, top_p=0, top_k=0, min_p=0, repetition_penalty=1, seed=0).sampling
    assert sampling == Sampling(
        seed=0, temperature=0.0, top_p=0.0, top_k=0, min_p=0.0, repetition_penalty=1.0
    )
    message = sent(max_tokens=5, max_completion_tokens=6, top_k=-1)
    assert (message.max_tokens, message.sampling.top_k) == (6, 0)
    assert sent(max_completion_tokens=-1).max_tokens is sent(max_tokens=-1).max_tokens is None


@given(st.integers(-(2**63), 2**63 - 1))
def test_any_seed_of_the_api_fits_the_wire_and_a_negative_one_is_random(seed: int) -> None:
    first, second = (sent(seed=seed).sampling.seed for _ in range(2))
    assert 0 <= first < 2**63
    assert (first == second == seed) is (seed >= 0)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"continue_final_message": False, "add_generation_prompt": True}, {}),
        (begun() | {"add_generation_prompt": False}, {PROMPT_ENDS: IN_MESSAGE}),
        ({"add_generation_prompt": False}, {PROMPT_ENDS: BEFORE_TURN}),
    ],
)
def test_continuation_is_asked_of_the_template(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert unpack(sent(**fields)).options == options


# --- tools -------------------------------------------------------------------------------------------

FUNCTIONS = {"functions": [F["function"], G["function"]]}
ONE_G, ONE_C = (Calling(required=True, name=name, single=True) for name in "gc")
C = {"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "grammar": {"definition": "x"}}}}

CALLED: list[tuple[dict[str, Any], str, Calling | None]] = [
    ({"tool_choice": "auto", "parallel_tool_calls": False}, "", None),
    ({"tools": [F, G]}, "fg", None),
    ({"tools": [F, G, STRICT], "tool_choice": "none", "parallel_tool_calls": False}, "", None),
    ({"tools": [F, G], "parallel_tool_calls": False}, "fg", Calling(single=True)),
    ({"tools": [F | {"strict": True}, STRICT]}, "fs", Calling(strict=["f", "s"])),
    (
        {"tools": [F, STRICT], "tool_choice": "required", "parallel_tool_calls": False},
        "fs",
        Calling(required=True, single=True, strict=["s"]),
    ),
    ({"tools": [F, G], "tool_choice": named("g")}, "fg", ONE_G),
    ({"tools": [F, G], "tool_choice": {"type": "function", "name": "g"}}, "fg", ONE_G),
    ({"tools": [F, G, STRICT], "tool_choice": allowed("auto", named("g"))}, "g", None),
    ({"tools": [F, G, STRICT], "tool_choice": allowed("auto", named("s"), {"name": "f"})}, "fs",
     Calling(strict=["s"])),
    ({"tools": [F, SEARCH], "tool_choice": allowed("required", named("f"), {"type": "mcp", "x": 1})}, "f",
     Calling(required=True)),
    ({"tools": [{"function": {"name": "f"}}, {"type": None, "function": {"name": "g"}}]}, "fg", None),
    ({"tools": [F, C], "tool_choice": {"type": "custom", "custom": {"name": "c"}}}, "fc", ONE_C),
    ({"tools": [F, C], "tool_choice": allowed("auto", {"type": "custom", "name": "c"})}, "c", None),
    (FUNCTIONS, "fg", Calling(single=True)),
    (FUNCTIONS | {"function_call": "none"}, "", None),
    (FUNCTIONS | {"function_call": {"name": "g"}}, "fg", ONE_G),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "names", "calling"), CALLED)
def test_tool_choice_determines_offered_tools_and_call_constraint(
    fields: dict[str, Any], names: str, calling: Calling | None
) -> None:
    message = sent(**fields)
    offered = [each["function"]["name"] for each in unpack(message).tools or []]
    assert (offered, message.calling) == ([*names], calling)


def test_reasoning_and_custom_calls_of_the_past_are_read() -> None:
    parts: list[dict[str, Any]] = [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}]
    parts += [
        {"type": "redacted_thinking"},
        {"type": "reasoning", "text": "b"},
        {"type": "text", "text": "c"},
    ]
    calls = [{"id": "1", "type": "custom", "custom": {"name": "c", "input": "x"}}]
    past = {"role": "assistant", "content": parts, "tool_calls": calls}
    [_, answer] = unpack(sent(messages=[*HELLO, past], tools=[C])).messages or []
    assert (answer["content"], answer["reasoning_content"]) == ("c", "a\n\nb")
    assert answer["tool_calls"][0]["function"] == {"name": "c", "arguments": {"input": "x"}}
