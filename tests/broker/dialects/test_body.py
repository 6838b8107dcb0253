"""Decoding of JSON bodies: their size is measured before, integers are taken in any notation, and null is
absent."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from broker.api.chat import body as chat_body
from broker.api.completions import completions
from broker.api.embeddings import embeddings, rerank
from broker.api.messages import body as messages
from broker.api.responses import body as responses
from broker.dialects import body as bodies
from broker.dialects.body import (
    CONTAINERS_MAX,
    DEPTH_MAX,
    VALUES_MAX,
    check_size,
    decode,
    encode,
    encode_text,
    is_too_deep,
)
from protocol.errors import Code, RequestError

DOCUMENTS = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=15,
)


def sizes(document: Any) -> tuple[int, int, int, int]:
    """Count the values behind a comma, the keys and the containers of a document, and measure its depth."""
    if not isinstance(document, dict | list):
        return 0, 0, 0, 0
    inner = [sizes(value) for value in (document.values() if isinstance(document, dict) else document)]
    keys = len(document) if isinstance(document, dict) else 0
    own = (max(0, len(document) - 1), keys, 1, 0)
    commas, keys, containers, _ = (sum(each) for each in zip(own, *inner, strict=True))
    return commas, keys, containers, 1 + max((depth for *_, depth in inner), default=0)


def refusal(body: bytes) -> str:
    try:
        check_size(body)
    except RequestError as error:
        return error.message if error.code is Code.REQUEST_TOO_LARGE else ""
    return ""


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"]": ', "}")], ids=["arrays", "objects"])
def test_body_deeper_than_its_maximum_is_refused(opening: str, closing: str) -> None:
    decoder = msgspec.json.Decoder(Any)
    decode(decoder, (opening * DEPTH_MAX + "1" + closing * DEPTH_MAX).encode())
    with pytest.raises(RequestError, match="nested too deeply"):
        decode(decoder, (opening * (DEPTH_MAX + 1) + "1" + closing * (DEPTH_MAX + 1)).encode())


@settings(max_examples=60)
@given(DOCUMENTS, st.booleans())
def test_exactly_the_values_keys_containers_and_depth_count(document: Any, is_ascii: bool) -> None:
    body = json.dumps(document, ensure_ascii=is_ascii).encode(errors="replace")
    *numbers, depth = sizes(document)
    counts = dict(zip(("VALUES_MAX", "KEYS_MAX", "CONTAINERS_MAX"), numbers, strict=True))
    with pytest.MonkeyPatch.context() as patched:
        for name, count in counts.items():
            patched.setattr(bodies, name, count)
        assert not refusal(body)
        for name, count in counts.items():
            patched.setattr(bodies, name, count - 1)
            assert refusal(body)
            patched.setattr(bodies, name, count)
        patched.setattr(bodies, "DEPTH_MAX", depth)
        assert not is_too_deep(body)
        patched.setattr(bodies, "DEPTH_MAX", depth - 1)
        assert is_too_deep(body) or not depth


def test_body_of_millions_of_values_is_refused_before_it_is_decoded() -> None:
    for item, count, excess in (
        (b'{"a":"b"}', CONTAINERS_MAX, "131072 JSON arrays and objects"),
        (b'"a,b"', VALUES_MAX, "1048576 JSON values"),
    ):
        with pytest.raises(RequestError, match=excess) as caught:
            decode(msgspec.json.Decoder(), b'{"x":[' + b",".join([item] * (count + 2)) + b"]}")
        assert caught.value.code is Code.REQUEST_TOO_LARGE


@pytest.mark.parametrize("text", ["[{" * 70_000, '\\"{,' * 140_000, "," * 1_100_000])
def test_text_does_not_count_whatever_it_contains(text: str) -> None:
    check_size(json.dumps({"messages": [{"role": "user", "content": text}]}).encode())


def seconds(body: bytes) -> float:
    """Return the CPU seconds of the fastest of some checks of a body."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        refusal(body)
        times.append(time.thread_time() - began)
    return min(times)


@pytest.mark.parametrize(("head", "tail"), [(b"", b'"'), (b'"', b'\\"'), (b"", b"{}")])
def test_time_for_a_body_that_is_not_json_is_proportional_to_its_length(
    head: bytes, tail: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VALUES_MAX", "KEYS_MAX", "CONTAINERS_MAX"):
        monkeypatch.setattr(bodies, name, 1000)
    short, long = (head + b"," * 1001 + tail * count for count in (100_000, 400_000))
    assert seconds(long) < 10 * seconds(short)


SAID = [{"role": "user", "content": "Hello"}]


class Part(Struct):
    count: int | None = None


class Whole(Struct):
    share: float = 0.0
    counts: list[int] = []
    parts: list[Part] = []
    named: dict[str, int] = {}
    free: Any = None


_decoder = msgspec.json.Decoder(Whole)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", 9, "'temperature' must be at most 2."),
        ("seed", -(10**30), f"'seed' must be at least {-(2**63)}."),
        ("sparse_prefill", {"keep": 0}, "'sparse_prefill.keep' must be greater than 0."),
        ("max_tokens", 0, "'max_tokens' must be at least 1, or -1."),
        ("stop", ["a", ""], "'stop[1]' must not be empty."),
        ("stop", ["a"] * 17, "'stop' must have at most 16 items."),
        ("cache_salt", "a" * 257, "'cache_salt' must have at most 256 characters."),
        ("logit_bias", {"５": 1}, "A key of 'logit_bias' must match '^[0-9]{1,9}$'."),
        ("logit_bias", {"5": 100.5}, "A value of 'logit_bias' must be at most 100."),
        ("logit_bias", {str(n): 1 for n in range(1025)}, "'logit_bias' must have at most 1024 entries."),
    ],
)
def test_every_limit_has_one_wording(field: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat_body.read(json.dumps({"messages": SAID, field: value}).encode())
    assert refused.value.message == message
    assert refused.value.param == message.split("'")[1]


@pytest.mark.parametrize(
    ("read", "body", "field"),
    [
        (chat_body.read, {"messages": SAID, "max_tokens": 426.0, "seed": 7.0}, "max_tokens"),
        (completions.read, {"prompt": "a", "max_tokens": 426.0}, "max_tokens"),
        (responses.read, {"input": "a", "max_output_tokens": 426.0}, "max_output_tokens"),
        (messages.read, {"model": "m", "messages": SAID, "max_tokens": 426.0}, "max_tokens"),
        (embeddings.read, {"input": "a", "dimensions": 426.0}, "dimensions"),
        (rerank.read, {"query": "a", "documents": ["b"], "top_n": 426.0}, "top_n"),
    ],
)
def test_every_dialect_takes_them(read: Any, body: dict[str, Any], field: str) -> None:
    found = getattr(read(json.dumps(body).encode()), field)
    assert (type(found), found) == (int, 426)
    body[field] = 426.5
    with pytest.raises(RequestError, match="Expected `int") as refused:
        read(json.dumps(body).encode())
    assert refused.value.param == field


@settings(max_examples=50)
@given(
    counts=st.lists(st.integers(-(2**53), 2**53)),
    parts=st.lists(st.integers(0, 9) | st.none()),
    named=st.dictionaries(st.text(), st.integers(0, 9) | st.none()),
)
def test_floats_and_nulls_are_found_wherever_a_type_has_them(
    counts: list[int], parts: list[int | None], named: dict[str, int | None]
) -> None:
    free = {"kept": 3.0, "large": 10**30, "null": None}
    written: dict[str, Any] = {
        "share": 2.0,
        "counts": [float(count) for count in counts],
        "parts": [{"count": None if part is None else float(part)} for part in parts] or None,
        "named": named,
        "free": free,
    }
    read = decode(_decoder, json.dumps(written).encode())
    assert read.counts == counts
    assert [part.count for part in read.parts] == parts
    assert read.named == {name: count for name, count in named.items() if count is not None}
    assert all(type(count) is int for count in read.counts)
    assert (read.free, type(read.free["kept"])) == (free, float)  # data
    assert type(read.share) is float


@pytest.mark.parametrize("text", ["a\x85\u2028\u2029b", "é\x85", "“\u2028”", "½ 駅 \xc2\xe2", "\x0b\x1c\x7f"])
def test_what_is_written_has_one_line_for_every_reader(text: str) -> None:
    for written in (
        encode_text(text),
        encode({text: [text, msgspec.Raw(json.dumps(text, ensure_ascii=False))]}),
    ):
        assert len(written.decode().splitlines()) == 1
    assert json.loads(encode_text(text)) == text
    assert json.loads(encode({text: text})) == {text: text}


@pytest.mark.parametrize("body", [b'{"counts":["1"]}', b'{"counts":[1e300]}', b'{"counts":[1.0,null,1.5]}'])
def test_all_else_is_refused_as_before(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"Expected `int"):
        decode(_decoder, body)


USER, NULLS = {"role": "user"}, {"const": None, "enum": [None], "additionalProperties": None}


def said_by_chat(**call: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def in_chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], **fields}


@pytest.mark.parametrize(
    ("read", "body", "param"),
    [
        (chat_body.read, said_by_chat(id=None, type=None, function={"name": "f", "arguments": None}), ""),
        (chat_body.read, {"messages": [USER | {"function_call": {"name": "f", "arguments": None}}]}, ""),
        (chat_body.read, said_by_chat(function={"name": None}), "messages[1].tool_calls[0].function.name"),
        (chat_body.read, in_chat({"type": "text", "text": None}, stop=None, logit_bias={"5": None}), ""),
        (chat_body.read, in_chat({"type": "text"}), "messages[0].content[0].text"),
        (chat_body.read, in_chat({"type": None, "text": "a"}), "messages[0].content[0].type"),
        (chat_body.read, in_chat(None), "messages[0].content[0]"),
        (chat_body.read, in_chat(stop=["a", None]), "stop[1]"),
        (chat_body.read, in_chat(tools=[{"type": None, "function": {"name": "f", "strict": None}}]), ""),
        (chat_body.read, in_chat(response_format={"type": None}), "response_format.type"),
        (responses.read, {"input": "a", "text": {"format": {"type": None}}}, ""),
        (messages.read, {"messages": SAID, "max_tokens": None}, "max_tokens"),
        (messages.read, in_chat({"type": "text", "text": None}, max_tokens=1), ""),
        (messages.read, in_chat(tool_choice={"type": None}, max_tokens=1), "tool_choice.type"),
    ],
)
def test_null_is_absent_at_every_depth(read: Any, body: dict[str, Any], param: str) -> None:
    raw = json.dumps(body).encode()
    if not param:
        read(raw)
        return
    with pytest.raises(RequestError, match=r"is required|got `null`") as refused:
        read(raw)
    assert refused.value.param == param


def test_nulls_that_are_data_stay() -> None:
    """Beside a null that is removed, those in schemas and in arguments are kept."""
    call = {"id": "c", "type": None, "function": {"name": "f", "arguments": {"a": None, "b": [None]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": NULLS}}
    form = {"type": "json_schema", "json_schema": {"schema": NULLS, "strict": None}}
    body = said_by_chat(**call) | {"tools": [tool], "response_format": form}
    read = chat_body.read(json.dumps(body).encode())
    assert read.tools is not None
    assert read.tools[0].function is not None
    assert read.tools[0].function.parameters == NULLS
    assert read.messages[1].tool_calls is not None
    assert read.messages[1].tool_calls[0].function.arguments == {"a": None, "b": [None]}
    assert read.response_format is not None
    assert read.response_format.json_schema is not None
    assert json.loads(bytes(read.response_format.json_schema.schema)) == NULLS
