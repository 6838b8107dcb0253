"""Size of JSON bodies, measured before decoding."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dialects import json_size
from broker.dialects.body import decode
from broker.dialects.json_size import DEPTH_MAX, KEYS_MAX, VALUES_MAX, check_size, is_too_deep
from protocol.errors import Code, RequestError

MOST_S = 5.0
"""Far more than the pass takes, and far less than a quadratic one."""

DOCUMENTS = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
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


@given(DOCUMENTS)
def test_depth_of_containers_is_exact(document: Any) -> None:
    body = json.dumps(document).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_size, "DEPTH_MAX", depth(document))
        assert not is_too_deep(body)
        patched.setattr(json_size, "DEPTH_MAX", depth(document) - 1)
        assert is_too_deep(body) or not depth(document)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"]": ', "}")], ids=["arrays", "objects"])
def test_body_deeper_than_its_maximum_is_refused(opening: str, closing: str) -> None:
    decoder = msgspec.json.Decoder(Any)
    decode(decoder, (opening * DEPTH_MAX + "1" + closing * DEPTH_MAX).encode())
    with pytest.raises(RequestError, match="nested too deeply"):
        decode(decoder, (opening * (DEPTH_MAX + 1) + "1" + closing * (DEPTH_MAX + 1)).encode())


@given(DOCUMENTS, st.booleans())
def test_exactly_the_values_keys_and_containers_count(document: Any, is_ascii: bool) -> None:
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


@pytest.mark.parametrize(
    ("item", "excess"),
    [
        (b"{}", "131072 JSON arrays and objects"),
        (b"[]", "131072 JSON arrays and objects"),
        (b"[[[0]]]", "131072 JSON arrays and objects"),
        (b'{"a":"b"}', "131072 JSON arrays and objects"),
        (b"0", "1048576 JSON values"),
        (b'""', "1048576 JSON values"),
        (b'"a,b"', "1048576 JSON values"),
    ],
    ids=lambda item: item.decode() if isinstance(item, bytes) else "",
)
def test_body_of_millions_of_values_is_refused_before_it_is_decoded(item: bytes, excess: str) -> None:
    body = b'{"x":[' + b",".join([item] * (VALUES_MAX + 2)) + b"]}"
    with pytest.raises(RequestError, match=excess) as caught:
        decode(msgspec.json.Decoder(), body)
    assert caught.value.code is Code.REQUEST_TOO_LARGE


def test_object_of_too_many_keys_is_refused() -> None:
    with pytest.raises(RequestError, match="262144 JSON keys"):
        check_size(json.dumps(dict.fromkeys(map(str, range(KEYS_MAX + 1)))).encode())


@pytest.mark.parametrize("text", ["1,2," * 600_000, "[{" * 1_200_000, '\\"{,' * 600_000, "," * 4_000_000])
def test_text_does_not_count_whatever_it_contains(text: str) -> None:
    check_size(json.dumps({"messages": [{"role": "user", "content": text}]}).encode())


@pytest.mark.parametrize("tail", [b'"', b'\\"' * 2_000_000, b"{}" * 2_000_000, b'"\\', b'""' * 2_000_000])
def test_body_that_is_not_json_takes_no_longer(tail: bytes) -> None:
    began = time.thread_time()
    for body in (b"," * (VALUES_MAX + 1) + tail, b'"' + b"," * (VALUES_MAX + 1) + tail):
        refusal(body)
    assert time.thread_time() - began < MOST_S
