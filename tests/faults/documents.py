"""Valid request bodies, and mutations of them as documents and as bytes."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from typing import Any

from tests.images import MP4, data_url, picture

PIXELS, FILM = data_url(picture()), data_url(MP4, "video/mp4")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 17, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "\x00", "\ud800", "é" * 300, "null", "1", [], [[]], [None], [1, "a"],
    {}, {"": {}}, {"type": "text"}, {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
    {"type": "nothing"}, [{"role": "user"}], "data:,", ["a"] * 40, "a" * 5000,
)  # fmt: skip
ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1", "cp037", "utf-7")


def valid_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Return path and body of valid requests, with as many parameters as possible."""
    common = {
        "model": "fake", "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "seed": 7, "stop": ["never said"], "ignore_eos": False, "n": 1, "logit_bias": {"5": -1.5},
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "priority": 0,
        "cache_salt": "salt", "cache_pin": False, "user": "somebody",
    }  # fmt: skip
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "two words"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "user", "content": "and now"},
    ]
    more = {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
    chat = {"messages": talk, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3, **more}
    chat |= {"response_format": {"type": "text"}, "chat_template_kwargs": {"a": 1}, "enable_thinking": False}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    plain = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    text = {"prompt": ["one", "two"], "logprobs": 2, "best_of": 1, "echo": False, "suffix": ""}
    scored = {"prompt": [[1, 2, 3], [4]], "echo": True, "logprobs": 1, "max_tokens": 1}
    return [
        (CHAT, common | chat), (CHAT, common | chat | streamed), (CHAT, plain), (CHAT, plain | streamed),
        (TEXT, common | text), (TEXT, common | text | streamed), (TEXT, {"prompt": "a b", "max_tokens": 2}),
        (TEXT, scored), (TEXT, scored | streamed | {"max_tokens": 0, "logprobs": None}), *held_bodies(plain),
        (TEXT, {"prompt": "a", "guided_regex": "a|b"} | streamed), *responses_bodies(), *anthropics_bodies(),
        ("/tokenize", {"prompt": "a b", "add_special_tokens": False, "return_token_strs": True}),
        ("/tokenize", {"messages": talk, **more}), ("/detokenize", {"tokens": [1, 2]}), *seen_bodies(),
    ]  # fmt: skip


def anthropics_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Return valid bodies for messages and for counting their tokens."""
    cached = {"cache_control": {"type": "ephemeral"}}
    found = [{"type": "text", "text": "42"}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": found, **cached}
    tool = {"name": "f", "input_schema": {"type": "object"}, "strict": True}
    said = [
        {"type": "thinking", "thinking": "Well.", "signature": "rh1_0"},
        {"type": "text", "text": "two words"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
    ]
    prompt = {
        "model": "fake",
        "system": [{"type": "text", "text": "Be brief.", **cached}],
        "messages": [
            {"role": "user", "content": "two words"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": [result | {"is_error": True}]},
            {"role": "system", "content": "Be kind."},
        ],
        "tools": [tool, {"type": "bash_20250124", "name": "bash"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
    }
    drawn = {"max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "stop_sequences": ["never said"]}
    ours = {"seed": 7, "priority": 0, "cache_salt": "salt", "cache_pin": False}
    plain = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return [
        (MESSAGES, prompt | drawn | ours), (MESSAGES, prompt | drawn | {"stream": True}), (MESSAGES, plain),
        (MESSAGES + "?beta=true", plain | {"stream": True}), (MESSAGES + "/count_tokens", prompt),
    ]  # fmt: skip


def responses_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Return valid bodies for responses, with all kinds of items and the parameters that agents use."""
    function = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "object"}}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "id": "m", "role": "user", "content": [{"type": "input_text", "text": "words"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "AAAA"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "42"}]},
        {"type": "web_search_call", "action": {}},
        {"type": "shell_call_output", "output": {"type": "exit"}},
        {"role": "user", "content": "and now"},
    ]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    agent = {
        "instructions": "i", "store": False, "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"}, "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tools": [function, {"type": "namespace", "name": "n", "tools": [function]}, {"type": "web_search"}],
        "tool_choice": "auto", "parallel_tool_calls": True, "truncation": "auto", "top_logprobs": 2,
        "max_tool_calls": 3, "previous_response_id": None, "prompt_cache_key": "k", "background": False,
    }  # fmt: skip
    plain = {"input": "hi", "max_output_tokens": 2}
    return [
        (RESPONSES, agent | {"model": "fake", "input": items, "max_output_tokens": 3}),
        (RESPONSES, agent | {"input": items, "max_output_tokens": 3, "stream": True}),
        (RESPONSES, plain | {"tools": [function], "tool_choice": allowed}),
        (RESPONSES, plain),
        (RESPONSES, plain | {"stream": True}),
    ]


def seen_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Return valid bodies with images and videos in all places that allow them."""
    encoded = PIXELS.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    block = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    linked = {"type": "image", "source": {"type": "url", "url": PIXELS}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": PIXELS, "detail": "low"}}
    film = {"type": "video", "video": [PIXELS, PIXELS]}
    clip = {"type": "video_url", "video_url": {"url": FILM}}
    shown = {"type": "input_image", "image_url": PIXELS, "detail": "auto"}
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, image, film, clip]},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": PIXELS}]},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, shown, film, clip]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [shown]},
    ]
    return [
        (CHAT, {"messages": talk, "max_tokens": 2}), ("/tokenize", {"messages": talk}),
        (RESPONSES, {"input": items, "max_output_tokens": 2}),
        (MESSAGES, {"messages": [{"role": "user", "content": [result, block, linked]}], "max_tokens": 2}),
    ]  # fmt: skip


def held_bodies(plain: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return valid bodies with structured output or tool calls."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, "b", None]}}, "required": ["a"]}
    described = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    named = {"type": "function", "function": {"name": "f"}}
    tools = {"tools": [{"function": {"name": "f", "parameters": schema, "strict": True}}]}
    forced = {"tool_choice": named, "parallel_tool_calls": False}
    some = {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}}
    held = {"structured_outputs": {"choice": ["a", "b"], "json_object": None}}
    return [
        (CHAT, plain | tools | forced | {"response_format": described}),
        (CHAT, plain | tools | some | held | {"stream": True}),
        (CHAT, plain | {"guided_json": schema}),
    ]


def value(dice: random.Random) -> Any:
    """Draw any value, copied because its content may be mutated later."""
    return copy.deepcopy(dice.choice(VALUES))


def change_one_field(dice: random.Random, body: dict[str, Any]) -> str:
    """Change a field and return its name."""
    name = dice.choice(sorted(body))
    body[name] = value(dice)
    return name


def change_places(dice: random.Random, body: dict[str, Any]) -> None:
    """Set, delete and add values anywhere in the body, including unknown fields."""
    for _ in range(dice.choice((1, 1, 2, 5))):
        place: Any = body
        while True:
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = dice.choice(keys) if keys else None
            inside = place[key] if key is not None else None
            if not isinstance(inside, dict | list) or not inside or dice.random() < 0.3:
                break
            place = inside
        match dice.randrange(4):
            case 0 if isinstance(place, dict):
                place[dice.choice(("unknown", "", "\x00", "messages", "n" * 900))] = value(dice)
            case 1 if key is not None:
                del place[key]
            case _ if key is not None:
                place[key] = value(dice)


def write(body: dict[str, Any]) -> bytes:
    # Lone surrogates are escaped; NaN and Infinity are written as by Python.
    return json.dumps(body, ensure_ascii=True).encode()


def nest(dice: random.Random, text: bytes) -> bytes:
    depth = dice.choice((10, 500, 1000, 30_000))
    opening, closing = dice.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"":', b"}]")))
    deep = opening * depth + b"1" + closing * dice.choice((depth, depth - 1, 0))
    return text[:-1] + b', "%b": ' % dice.choice((b"messages", b"unknown", b"tools", b"stop")) + deep + b"}"


def double_keys(dice: random.Random, text: bytes) -> bytes:
    second = json.dumps(dice.choice(VALUES)).encode()
    return text[:-1] + b', "%b": %b}' % (dice.choice((b"messages", b"n", b"stream", b"seed")), second)


def write_huge_number(dice: random.Random, text: bytes) -> bytes:
    number = dice.choice(
        (b"1e999", b"-1e999", b"1" * 5000, b"0." + b"0" * 4000 + b"1", b"1e-999", b"0x10", b"01")
    )
    name = dice.choice((b"seed", b"temperature", b"n", b"max_tokens", b"top_k", b"unknown"))
    return text[:-1] + b', "%b": %b}' % (name, number)


def cut_short(dice: random.Random, text: bytes) -> bytes:
    return text[: dice.randrange(len(text))]


def damage(dice: random.Random, text: bytes) -> bytes:
    found = bytearray(text)
    for _ in range(dice.choice((1, 1, 3, 20))):
        place = dice.randrange(len(found)) if found else 0
        match dice.randrange(3):
            case 0 if found:
                found[place] ^= 1 << dice.randrange(8)
            case 1:
                found[place:place] = dice.choice(
                    (b'"', b"{", b"]", b"\\", b"\\ud800", b"\x00", b"\xff\xfe", b",")
                )
            case _:
                del found[place : place + dice.choice((1, 1, 9))]
    return bytes(found) or b" "


def encode_otherwise(dice: random.Random, text: bytes) -> bytes:
    return text.decode().encode(dice.choice(ENCODINGS))


def replace(dice: random.Random, text: bytes) -> bytes:
    """Return bytes that are no document."""
    return dice.choice(
        (b"", b" ", b"null", b"[]", b"{}", b'"text"', b"0", b"\xff\xfe", b"\x00" * 99, b"{" * 99_999,
         b"<xml/>", b"a=b&c=d", b"\xef\xbb\xbf{}", b"NaN", b"\x80\x04K\x01.", dice.randbytes(200), text * 2)
    )  # fmt: skip


def compress(dice: random.Random, text: bytes) -> bytes:
    return gzip.compress(dice.choice((text, bytes(2**22))), mtime=0)  # a timestamp would not be reproducible


def swell(dice: random.Random, text: bytes) -> bytes:
    return text[:-1] + b', "unknown": "' + b"a" * dice.choice((2**17, 2**17, 2**20)) + b'"}'


ON_TEXT: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    nest, double_keys, write_huge_number, cut_short, cut_short, damage, damage, damage, encode_otherwise,
    replace, compress, swell,
)  # fmt: skip


VALID = valid_bodies()
