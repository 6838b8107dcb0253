"""Embeddings: messages to the worker, fields refused by name, and encodings of vectors."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dialects import embeddings
from broker.dialects.embeddings import INPUTS_MAX, EmbeddingsRenderer
from protocol.errors import Code, RequestError
from protocol.messages import Embed, EmbeddingChunk
from protocol.packed_texts import unpack
from tests import factories


def read(given: Any, **fields: Any) -> embeddings.Body:
    return embeddings.read(json.dumps({"input": given, **fields}).encode())


def asked(given: Any, **fields: Any) -> Embed:
    return embeddings.embed(read(given, **fields), id="embd-1", incarnation="g")


def encoded(sequence: int, vectors: dict[int, list[float]]) -> EmbeddingChunk:
    packed = b"".join(struct.pack(f"<{len(vector)}f", *vector) for vector in vectors.values())
    return factories.encoded(sequence, list(vectors), packed)


TEXTS: dict[str, tuple[Any, list[Any]]] = {
    "a text": ("駅 🚂", ["駅 🚂"]), "ids": ([1, 2], [[1, 2]]), "lists of ids": ([[1, 2], [3]], [[1, 2], [3]]),
}  # fmt: skip


@pytest.mark.parametrize(("given", "texts"), TEXTS.values(), ids=TEXTS)
def test_texts_go_on_as_they_came(given: Any, texts: list[Any]) -> None:
    request = asked(given)
    assert unpack(request) == texts
    assert (request.count, request.source, request.dimensions) == (len(texts), "input", None)


def test_embedding_options_are_passed_to_the_worker() -> None:
    request = asked("a", dimensions=64, priority=-2, user="u", unknown=1, encoding_format=None)
    assert (request.dimensions, request.priority, request.tokens_max) == (64, -2, None)
    assert asked("a", truncate_prompt_tokens=9).tokens_max == 9
    assert asked("a", truncate_prompt_tokens=-1).tokens_max == 2**31 - 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"input": []}, "input"),
    "one of several": ({"input": ["a", ""]}, "input[1]"),
    "no ids": ({"input": [[1], []]}, "input[1]"),
    "a mixture": ({"input": ["a", [1]]}, "input"),
    "a negative one": ({"input": [[1], [2, -1]]}, "input[1][1]"),
    "too many": ({"input": ["a"] * (INPUTS_MAX + 1)}, "input"),
    "a format": ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
}


@pytest.mark.parametrize(("body", "param"), REFUSED.values(), ids=REFUSED)
def test_invalid_request_error_names_the_param(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        embeddings.read(json.dumps(body).encode())
    assert caught.value.code is Code.INVALID_REQUEST
    assert caught.value.param == param


# --- vectors -----------------------------------------------------------------------------------------


lists = st.lists(st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=9)


@settings(max_examples=40)
@given(lists, st.randoms(), st.booleans())
def test_vectors_are_in_the_order_of_their_texts_whatever_the_order_of_work(
    vectors: list[list[float]], random: Any, in_base64: bool
) -> None:
    body = read(["x"] * len(vectors), encoding_format="base64" if in_base64 else "float")
    document = EmbeddingsRenderer("m", body)
    order = list(range(len(vectors)))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    for number, places in enumerate((order[:cut], order[cut:])):
        part = encoded(number, {place: vectors[place] for place in places})
        assert document.feed([(0, [part])]) == b""
    assert not document.over
    told = json.loads(document.feed([(0, [factories.finished(prompt=7)])]))
    assert document.over
    assert told["object"] == "list"
    assert (told["model"], told["usage"]) == ("m", {"prompt_tokens": 7, "total_tokens": 7})
    assert [entry["index"] for entry in told["data"]] == list(range(len(vectors)))
    for entry, vector in zip(told["data"], vectors, strict=True):
        assert entry["object"] == "embedding"
        found = entry["embedding"]
        if in_base64:
            raw = base64.b64decode(found)
            found = list(struct.unpack(f"<{len(raw) // 4}f", raw))
        assert found == vector


def test_a_document_has_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.dialects.renderers.DOCUMENT_BYTES_MAX", 100)
    document = EmbeddingsRenderer("m", read(["a", "b"]))
    document.feed([(0, [encoded(0, {0: [0.5]})])])
    with pytest.raises(RequestError, match="Send fewer texts"):
        document.feed([(0, [encoded(1, {1: [0.5] * 50})])])
