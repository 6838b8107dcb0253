"""Reranking: messages to the worker, fields refused by name, and rendered scores."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from broker.dialects import rerank
from broker.dialects.rerank import DOCUMENTS_MAX, RerankRenderer
from protocol.errors import RequestError
from protocol.messages import Rank
from protocol.packed_texts import unpack
from tests.factories import encoded, finished


def read(**fields: Any) -> rerank.Body:
    return rerank.read(json.dumps({"query": "q", "documents": ["a", "b", "c"], **fields}).encode())


def asked(**fields: Any) -> Rank:
    return rerank.rank(read(**fields), id="rerank-1", incarnation="g")


def told(body: rerank.Body, *scores: float) -> dict[str, Any]:
    """Return the document for scores that arrive one by one, the last one first."""
    document = RerankRenderer("rerank-1", "m", body)
    for number, place in enumerate(reversed(range(len(scores)))):
        vector = struct.pack("<f", scores[place])
        part = encoded(number, [place], vector)
        assert document.feed([(0, [part])]) == b""
    found: dict[str, Any] = json.loads(document.feed([(0, [finished(prompt=9)])]))
    return found


def test_query_and_documents_go_on() -> None:
    request = asked(documents=["a", {"text": "b", "title": "t"}], instruction="i", priority=1)
    assert unpack(request) == ["a", "b"]
    assert (request.query, request.instruction, request.count) == ("q", "i", 2)
    assert (request.source, request.priority, request.tokens_max) == ("documents", 1, None)
    assert asked(max_tokens_per_doc=100).tokens_max == 100
    assert asked(max_tokens_per_doc=100, truncate_prompt_tokens=-1).tokens_max == 2**31 - 1


def test_the_most_relevant_comes_first_and_the_first_of_equals() -> None:
    results = told(read(), 0.25, 0.75, 0.25)["results"]
    assert [(one["index"], one["relevance_score"]) for one in results] == [(1, 0.75), (0, 0.25), (2, 0.25)]
    assert "document" not in results[0]
    answer = told(read(top_n=2, return_documents=True, documents=["a", {"text": "b"}, "c"]), 0.25, 0.75, 0.5)
    assert answer["results"] == [
        {"index": 1, "relevance_score": 0.75, "document": {"text": "b"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
    ]
    assert (answer["id"], answer["model"]) == ("rerank-1", "m")
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no documents": ({"documents": []}, "documents"),
    "too many": ({"documents": ["a"] * (DOCUMENTS_MAX + 1)}, "documents"),
    "a document without a text": ({"documents": [{"title": "t"}]}, "documents[0].text"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
def test_invalid_request_error_names_the_param(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.param == param
