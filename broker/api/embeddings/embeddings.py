"""OpenAI embeddings: body -> `Embed`, and vectors -> a JSON document."""

from __future__ import annotations

import base64
import struct
from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from broker.dialects.body import NonEmptyStr, decode, encode, extra_schema, wrong
from broker.dialects.parameters import (
    NO_LIMIT,
    MaxTokens,
    Priority,
    PromptText,
    TextOrTokens,
    check_max_tokens,
    check_texts,
    limit_texts,
    texts_of,
)
from broker.dialects.renderers import DocumentRenderer
from broker.dispatch.flight import Item
from protocol.conversation import pack
from protocol.messages import Embed, EmbeddingChunk, Finished
from protocol.packed_texts import FLOAT_BYTES
from protocol.types import Usage

# Renderer of embeddings and rerank scores: one document from one flight, collected in any order of texts.
# Each text's entry is encoded when its vector arrives, which spreads the work so that other clients never
# wait for it.


class VectorRenderer(DocumentRenderer):
    """Base renderer of vectors. Subclasses encode the entry of a text, and the document."""

    advice = " Send fewer texts per request."

    def __init__(self, count: int) -> None:
        """`count`: number of texts."""
        super().__init__()
        self.usage = Usage(prompt_tokens=0, completion_tokens=0)
        self.entries: list[bytes] = [b""] * count
        """In the order of the texts."""

    def collect(self, choice: int, item: Item) -> None:
        match item:
            case EmbeddingChunk():
                for place, vector in _vectors(item):
                    self.entries[place] = entry = self.entry(place, vector)
                    self.count(len(entry))
            case Finished():
                self.over, self.usage = True, item.usage

    @abstractmethod
    def entry(self, place: int, vector: bytes) -> bytes:
        """Encode the entry of one text. `vector`: little-endian float32."""


def _vectors(message: EmbeddingChunk) -> Iterator[tuple[int, bytes]]:
    size = len(message.vectors) // max(1, len(message.places))
    for number, place in enumerate(message.places):
        yield place, message.vectors[number * size : (number + 1) * size]


def usage_object(usage: Usage) -> dict[str, int]:
    """Return token usage. Nothing is generated, so both counts are equal."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


INPUTS_MAX = 2048
"""Maximum number of texts in a request, as at OpenAI."""
FORMATS = ("float", "base64")
_WHOLE_CONTEXT = 2**31 - 1


class Body(Struct, kw_only=True):
    """Body of an embeddings request. Unknown fields are ignored and null means absent, as clients expect.

    `truncate_prompt_tokens` and `priority` are extensions, named as in vLLM. Longer texts are truncated to
    `truncate_prompt_tokens` tokens instead of refused; -1 is the model's context length.
    """

    input: NonEmptyStr | Annotated[list[TextOrTokens], limit_texts(INPUTS_MAX)]
    model: str | None = None
    encoding_format: Annotated[str, extra_schema(enum=[*FORMATS])] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=65536)] | None = None
    user: str | None = None
    truncate_prompt_tokens: MaxTokens | None = None
    priority: Priority | None = None

    @property
    def texts(self) -> list[PromptText]:
        """Inputs as texts or as lists of token ids."""
        return texts_of(self.input)


_body_decoder = msgspec.json.Decoder(Body)


def read(raw: bytes) -> Body:
    """Decode and check a body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_body_decoder, raw)
    if body.encoding_format not in (None, *FORMATS):
        raise wrong("encoding_format", f"must be one of {', '.join(FORMATS)}")
    check_max_tokens(body, "truncate_prompt_tokens")
    check_texts("input", body.input)
    if len(body.texts) > INPUTS_MAX:
        raise wrong("input", f"must have at most {INPUTS_MAX} texts")
    return body


def cut_at(tokens: int | None) -> int | None:
    """Return the truncation length for `Embed` and `Rank`. Only the worker knows the context length."""
    return _WHOLE_CONTEXT if tokens == NO_LIMIT else tokens


def embed(body: Body, *, id: str, incarnation: str) -> Embed:
    """Make the message to the worker. Raises `RequestError` if it cannot be encoded."""
    texts = body.texts
    return Embed(
        incarnation=incarnation,
        id=id,
        texts=pack(texts),
        count=len(texts),
        tokens_max=cut_at(body.truncate_prompt_tokens),
        priority=body.priority or 0,
        dimensions=body.dimensions,
    )


class EmbeddingsRenderer(VectorRenderer):
    """Renders the vectors in the order of the texts."""

    def __init__(self, model: str, body: Body) -> None:
        super().__init__(len(body.texts))
        self._model = model
        self._in_base64 = body.encoding_format == "base64"

    def entry(self, place: int, vector: bytes) -> bytes:
        if self._in_base64:
            written = b'"' + base64.b64encode(vector) + b'"'
        else:
            written = encode(struct.unpack(f"<{len(vector) // FLOAT_BYTES}f", vector))
        return b'{"object":"embedding","index":%d,"embedding":%b}' % (place, written)

    def document(self) -> bytes:
        tail = encode({"model": self._model, "usage": usage_object(self.usage)})
        return b'{"object":"list","data":[' + b",".join(self.entries) + b"]," + tail[1:]
