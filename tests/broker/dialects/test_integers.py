"""Integer fields accept whole numbers in any JSON notation, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from broker.dialects import chat_body, completions, embeddings, rerank
from broker.dialects.body import decode
from broker.dialects.integers import FLOATS_MAX
from broker.dialects.messages import body as messages
from broker.dialects.responses import body as responses
from protocol.errors import RequestError

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
    counts=st.lists(st.integers(-(2**53), 2**53), max_size=FLOATS_MAX // 2),
    parts=st.lists(st.integers(0, 9) | st.none(), max_size=FLOATS_MAX // 2),
)
def test_they_are_found_wherever_a_struct_or_a_list_has_them(
    counts: list[int], parts: list[int | None]
) -> None:
    written: dict[str, Any] = {
        "share": 2.0,
        "counts": [float(count) for count in counts],
        "parts": [{"count": None if part is None else float(part)} for part in parts],
        "free": {"kept": 3.0, "large": 10**30},
    }
    read = decode(_decoder, json.dumps(written).encode())
    assert read.counts == counts
    assert [part.count for part in read.parts] == parts
    assert all(type(count) is int for count in read.counts)
    assert type(read.free["kept"]) is float  # this field is not an integer field
    assert read.free["large"] == 10**30
    assert type(read.share) is float


@pytest.mark.parametrize(
    "body",
    [
        b'{"counts":["1"]}', b'{"counts":[1.5]}', b'{"counts":[1e300]}', b'{"counts":[true]}',
        b'{"counts":[1.0,1.5]}', b'{"counts":[' + b",".join([b"1.0"] * (FLOATS_MAX + 1)) + b"]}",
        b'{"named":{"a":1.0}}',
    ],
)  # fmt: skip
def test_all_else_is_refused_as_before(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"Expected `int") as refused:
        decode(_decoder, body)
    assert "float" in refused.value.message or b"1.0" not in body
