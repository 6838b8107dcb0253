"""Embeddings and reranking: messages to the worker, fields refused by name, and rendered answers."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api.embeddings import embeddings, rerank
from broker.api.embeddings.embeddings import INPUTS_MAX, EmbeddingsRenderer
from broker.api.embeddings.rerank import DOCUMENTS_MAX, RerankRenderer
from protocol.errors import Code, RequestError
from protocol.messages import Embed, EmbeddingChunk, Rank
from protocol.packed_texts import unpack
from tests import factories


def read(given: Any, **fields: Any) -> embeddings.Body:
    return embeddings.read(json.dumps({"input": given, **fields}).encode())


def embed(given: Any, **fields: Any) -> Embed:
    return embeddings.embed(read(given, **fields), id="embd-1", incarnation="g")


def read_rerank(**fields: Any) -> rerank.Body:
    return rerank.read(json.dumps({"query": "q", "documents": ["a", "b", "c"], **fields}).encode())


def rank(**fields: Any) -> Rank:
    return rerank.rank(read_rerank(**fields), id="rerank-1", incarnation="g")


def encoded(sequence: int, vectors: dict[int, list[float]]) -> EmbeddingChunk:
    packed = b"".join(struct.pack(f"<{len(vector)}f", *vector) for vector in vectors.values())
    return factories.encoded(sequence, list(vectors), packed)


@pytest.mark.parametrize(
    ("given", "texts"),
    [("駅 🚂", ["駅 🚂"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_texts_go_on_as_they_came(given: Any, texts: list[Any]) -> None:
    request = embed(given)
    assert unpack(request) == texts
    assert (request.count, request.source, request.dimensions) == (len(texts), "input", None)


def test_options_are_passed_to_the_worker() -> None:
    request = embed("a", dimensions=64, priority=-2, user="u", unknown=1, encoding_format=None)
    assert (request.dimensions, request.priority, request.tokens_max) == (64, -2, None)
    assert embed("a", truncate_prompt_tokens=9).tokens_max == 9
    assert embed("a", truncate_prompt_tokens=-1).tokens_max == 2**31 - 1


def test_query_and_documents_go_on() -> None:
    request = rank(documents=["a", {"text": "b", "title": "t"}], instruction="i", priority=1)
    assert unpack(request) == ["a", "b"]
    assert (request.query, request.instruction, request.count) == ("q", "i", 2)
    assert (request.source, request.priority, request.tokens_max) == ("documents", 1, None)
    assert rank(max_tokens_per_doc=100).tokens_max == 100
    assert rank(max_tokens_per_doc=100, truncate_prompt_tokens=-1).tokens_max == 2**31 - 1


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        (read, {"given": []}, "input"),
        (read, {"given": ["a", ""]}, "input[1]"),
        (read, {"given": [[1], []]}, "input[1]"),
        (read, {"given": ["a", [1]]}, "input"),
        (read, {"given": [[1], [2, -1]]}, "input[1][1]"),
        (read, {"given": ["a"] * (INPUTS_MAX + 1)}, "input"),
        (read, {"given": "a", "encoding_format": "int8"}, "encoding_format"),
        (read_rerank, {"query": ""}, "query"),
        (read_rerank, {"documents": []}, "documents"),
        (read_rerank, {"documents": ["a"] * (DOCUMENTS_MAX + 1)}, "documents"),
        (read_rerank, {"documents": [{"title": "t"}]}, "documents[0].text"),
    ],
)
def test_invalid_request_error_names_the_param(read: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, param)


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
    assert (told["object"], told["model"]) == ("list", "m")
    assert told["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
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


def ranked(body: rerank.Body, *scores: float) -> dict[str, Any]:
    """Return the document for scores that arrive one by one, the last one first."""
    document = RerankRenderer("rerank-1", "m", body)
    for number, place in enumerate(reversed(range(len(scores)))):
        assert document.feed([(0, [encoded(number, {place: [scores[place]]})])]) == b""
    found: dict[str, Any] = json.loads(document.feed([(0, [factories.finished(prompt=9)])]))
    return found


def test_the_most_relevant_comes_first_and_the_first_of_equals() -> None:
    results = ranked(read_rerank(), 0.25, 0.75, 0.25)["results"]
    assert [(one["index"], one["relevance_score"]) for one in results] == [(1, 0.75), (0, 0.25), (2, 0.25)]
    assert "document" not in results[0]
    body = read_rerank(top_n=2, return_documents=True, documents=["a", {"text": "b"}, "c"])
    answer = ranked(body, 0.25, 0.75, 0.5)
    assert answer["results"] == [
        {"index": 1, "relevance_score": 0.75, "document": {"text": "b"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
    ]
    assert (answer["id"], answer["model"]) == ("rerank-1", "m")
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
