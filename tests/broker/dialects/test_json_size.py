"""Size of JSON bodies, measured before decoding."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dialects import json_size
from broker.dialects.body import decode
from broker.dialects.json_size import CONTAINERS_MAX, DEPTH_MAX, VALUES_MAX, check_size, is_too_deep
from protocol.errors import Code, RequestError

DOCUMENTS = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=15,
)


def sizes(document: Any) -> tuple[int, int, int]:
    """Count the values behind a comma, the keys and the containers in a document."""
    if not isinstance(document, dict | list):
        return 0, 0, 0
    inner = [sizes(value) for value in (document.values() if isinstance(document, dict) else document)]
    keys = len(document) if isinstance(document, dict) else 0
    own = (max(0, len(document) - 1), keys, 1)
    commas, keys, containers = (sum(each) for each in zip(own, *inner, strict=True))
    return commas, keys, containers


def refusal(body: bytes) -> str:
    try:
        check_size(body)
    except RequestError as error:
        return error.message if error.code is Code.REQUEST_TOO_LARGE else ""
    return ""


def depth(document: Any) -> int:
    """Return how deep containers are nested in a document."""
    if not isinstance(document, dict | list):
        return 0
    inner = document.values() if isinstance(document, dict) else document
    return 1 + max(map(depth, inner), default=0)


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
    counts = dict(zip(("VALUES_MAX", "KEYS_MAX", "CONTAINERS_MAX"), sizes(document), strict=True))
    with pytest.MonkeyPatch.context() as patched:
        for name, count in counts.items():
            patched.setattr(json_size, name, count)
        assert not refusal(body)
        for name, count in counts.items():
            patched.setattr(json_size, name, count - 1)
            assert refusal(body)
            patched.setattr(json_size, name, count)
        patched.setattr(json_size, "DEPTH_MAX", depth(document))
        assert not is_too_deep(body)
        patched.setattr(json_size, "DEPTH_MAX", depth(document) - 1)
        assert is_too_deep(body) or not depth(document)


@pytest.mark.parametrize(
    ("item", "count", "excess"),
    [
        (b'{"a":"b"}', CONTAINERS_MAX, "131072 JSON arrays and objects"),
        (b'"a,b"', VALUES_MAX, "1048576 JSON values"),
    ],
    ids=lambda item: item.decode() if isinstance(item, bytes) else "",
)
def test_body_of_millions_of_values_is_refused_before_it_is_decoded(
    item: bytes, count: int, excess: str
) -> None:
    body = b'{"x":[' + b",".join([item] * (count + 2)) + b"]}"
    with pytest.raises(RequestError, match=excess) as caught:
        decode(msgspec.json.Decoder(), body)
    assert caught.value.code is Code.REQUEST_TOO_LARGE


@pytest.mark.parametrize("text", ["1,2," * 530_000, "[{" * 70_000, '\\"{,' * 140_000, "," * 1_100_000])
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
        monkeypatch.setattr(json_size, name, 1000)
    short, long = (head + b"," * 1001 + tail * count for count in (100_000, 400_000))
    assert seconds(long) < 10 * seconds(short)
