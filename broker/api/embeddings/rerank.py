"""Reranking as in Cohere, Jina and vLLM: body -> `Rank`, and scores -> a JSON document."""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct

from broker.api.embeddings.embeddings import check_cut, cut_at
from broker.api.embeddings.vectors import VectorRenderer, usage_object
from broker.dialects.body import check_range, decode, encode
from broker.dialects.parameters import PRIORITY_RANGE
from protocol.conversation import pack
from protocol.errors import Code, RequestError
from protocol.messages import Rank

DOCUMENTS_MAX = 2048
"""Maximum number of documents in a request."""


class Passage(Struct):
    """A document with fields, of which only `text` is used."""

    text: str


class Body(Struct, kw_only=True):
    """Body of a rerank request. Unknown fields are ignored and null means absent, as clients expect.

    `instruction`: what makes a document relevant, for models that accept one. `truncate_prompt_tokens`,
    `max_tokens_per_doc`: maximum tokens of query and document together; absent or -1: the
    model's context length. Longer documents are truncated.
    """

    query: str
    documents: list[str | Passage]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    max_tokens_per_doc: int | None = None
    priority: int | None = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]

    @property
    def tokens_max(self) -> int | None:
        return cut_at(self.truncate_prompt_tokens or self.max_tokens_per_doc)


_body_decoder = msgspec.json.Decoder(Body)


def read(raw: bytes) -> Body:
    """Decode and check a body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_body_decoder, raw)
    if not body.query:
        raise RequestError(Code.INVALID_REQUEST, "'query' must not be empty.", param="query")
    if not 1 <= len(body.documents) <= DOCUMENTS_MAX:
        message = f"'documents' must have 1 to {DOCUMENTS_MAX} entries, not {len(body.documents)}."
        raise RequestError(Code.INVALID_REQUEST, message, param="documents")
    check_range("top_n", body.top_n, 1, 2**31)
    check_range("priority", body.priority, *PRIORITY_RANGE)
    check_cut("truncate_prompt_tokens", body.truncate_prompt_tokens)
    check_cut("max_tokens_per_doc", body.max_tokens_per_doc)
    return body


def rank(body: Body, *, id: str, incarnation: str) -> Rank:
    """Make the message to the worker. Raises `RequestError` if it cannot be encoded."""
    texts = body.texts
    return Rank(
        incarnation=incarnation,
        id=id,
        texts=pack(texts),
        count=len(texts),
        tokens_max=body.tokens_max,
        source="documents",
        priority=body.priority or 0,
        query=body.query,
        instruction=body.instruction or "",
    )


class RerankRenderer(VectorRenderer):
    """Renders results by descending relevance; ties keep the order of the documents."""

    def __init__(self, id: str, model: str, body: Body) -> None:
        super().__init__(len(body.documents))
        self._head = {"id": id, "model": model}
        self._most = body.top_n
        self._texts = body.texts if body.return_documents else []

    def entry(self, place: int, vector: bytes) -> bytes:
        return vector

    def document(self) -> bytes:
        scores = [struct.unpack("<f", entry[:4])[0] for entry in self.entries]
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[: self._most]
        results = [self._result(place, scores[place]) for place in order]
        return encode(self._head | {"results": results, "usage": usage_object(self.usage)})

    def _result(self, place: int, score: float) -> dict[str, object]:
        told = {"document": {"text": self._texts[place]}} if self._texts else {}
        return {"index": place, "relevance_score": score, **told}
