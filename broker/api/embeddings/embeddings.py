"""OpenAI embeddings: body -> `Embed`, and vectors -> a JSON document."""

from __future__ import annotations

import base64
import struct
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from broker.api.embeddings.vectors import VectorRenderer, usage_object
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
from protocol.conversation import pack
from protocol.messages import Embed
from protocol.packed_texts import FLOAT_BYTES

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
