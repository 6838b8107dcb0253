"""Reranking as in Cohere, Jina and vLLM: body -> `Rank`, and scores -> a JSON document."""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from broker.api.embeddings.embeddings import VectorRenderer, cut_at, usage_object
from broker.dialects.body import NonEmptyStr, PositiveInt, decode, encode
from broker.dialects.parameters import MaxTokens, Priority, check_max_tokens
from protocol.conversation import pack
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

    query: NonEmptyStr
    documents: Annotated[list[str | Passage], Meta(min_length=1, max_length=DOCUMENTS_MAX)]
    model: str | None = None
    top_n: PositiveInt | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    truncate_prompt_tokens: MaxTokens | None = None
    max_tokens_per_doc: MaxTokens | None = None
    priority: Priority | None = None

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
    check_max_tokens(body, "truncate_prompt_tokens", "max_tokens_per_doc")
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
        fields = {"document": {"text": self._texts[place]}} if self._texts else {}
        return {"index": place, "relevance_score": score, **fields}
