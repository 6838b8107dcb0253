"""OpenAI embeddings: body -> `Embed`, and vectors -> a JSON document."""

from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec
from msgspec import Struct

from broker.api.embeddings.vectors import VectorRenderer, usage_object
from broker.dialects.body import check_range, decode, encode
from broker.dialects.parameters import PRIORITY_RANGE
from protocol.conversation import pack
from protocol.errors import Code, RequestError
from protocol.messages import Embed
from protocol.packed_texts import FLOAT_BYTES

INPUTS_MAX = 2048
"""Maximum number of texts in a request, as at OpenAI."""
DIMENSIONS_MAX = 65536
TOKEN_MAX = 2**31 - 1
"""Largest token id on the wire; only the worker knows the model's vocabulary."""
FORMATS = ("float", "base64")
_WHOLE_CONTEXT = -1


class Body(Struct, kw_only=True):
    """Body of an embeddings request. Unknown fields are ignored and null means absent, as clients expect.

    `truncate_prompt_tokens` and `priority` are extensions, named as in vLLM. Longer texts are truncated to
    `truncate_prompt_tokens` tokens instead of refused; -1 is the model's context length.
    """

    input: str | list[Any]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None

    @property
    def texts(self) -> list[Any]:
        """Inputs as texts or as lists of token ids."""
        is_one = isinstance(self.input, str) or (bool(self.input) and isinstance(self.input[0], int))
        return [self.input] if is_one else list(self.input)


_body_decoder = msgspec.json.Decoder(Body)


def read(raw: bytes) -> Body:
    """Decode and check a body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_body_decoder, raw)
    if body.encoding_format not in (None, *FORMATS):
        message = f"'encoding_format' must be one of {', '.join(FORMATS)}."
        raise RequestError(Code.INVALID_REQUEST, message, param="encoding_format")
    check_range("dimensions", body.dimensions, 1, DIMENSIONS_MAX)
    check_range("priority", body.priority, *PRIORITY_RANGE)
    check_cut("truncate_prompt_tokens", body.truncate_prompt_tokens)
    _check_texts(body.texts)
    return body


def check_cut(name: str, tokens: int | None) -> None:
    """Check a truncation length: -1, or a positive number of tokens."""
    if tokens != _WHOLE_CONTEXT:
        check_range(name, tokens, 1, TOKEN_MAX)


def cut_at(tokens: int | None) -> int | None:
    """Return the truncation length for `Embed` and `Rank`. Only the worker knows the context length."""
    return TOKEN_MAX if tokens == _WHOLE_CONTEXT else tokens


def _check_texts(texts: list[Any]) -> None:
    if not 1 <= len(texts) <= INPUTS_MAX:
        message = f"'input' must have 1 to {INPUTS_MAX} texts, not {len(texts)}."
        raise RequestError(Code.INVALID_REQUEST, message, param="input")
    for place, text in enumerate(texts):
        name = "input" if len(texts) == 1 else f"input[{place}]"
        if not isinstance(text, str | list) or type(text) is not type(texts[0]):
            message = "'input' must be text, token ids, or a list of either. The two cannot be mixed."
            raise RequestError(Code.INVALID_REQUEST, message, param="input")
        if not text:
            raise RequestError(Code.INVALID_REQUEST, f"'{name}' must not be empty.", param=name)
        if isinstance(text, list):
            _check_tokens(name, text)


def _check_tokens(name: str, tokens: list[Any]) -> None:
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token <= TOKEN_MAX:
            which = f"{name}[{index}]"
            raise RequestError(Code.INVALID_REQUEST, f"'{which}' must be a token id.", param=which)


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
