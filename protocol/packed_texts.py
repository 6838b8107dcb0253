"""Packed texts of an `Embed` or a `Rank`, serialized when the request is made, as in `conversation`."""

from __future__ import annotations

import msgspec

from protocol.errors import Code, RequestError
from protocol.messages import Embed, Rank
from protocol.types import Token

Text = str | list[Token]
"""A text, or its token ids."""

FLOAT_BYTES = 4
"""Size of each number of a vector (float32)."""

_decoder: msgspec.msgpack.Decoder[list[Text]] = msgspec.msgpack.Decoder(list[Text])


def unpack(request: Embed | Rank) -> list[Text]:
    """Unpack the texts. Raises `RequestError(invalid_request)` if they are malformed or not `count` texts."""
    try:
        texts = _decoder.decode(request.texts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"The texts are malformed: {error}."
        raise RequestError(Code.INVALID_REQUEST, message, param=request.source) from None
    if len(texts) != request.count:
        message = f"The request has {len(texts)} texts, but its count is {request.count}."
        raise RequestError(Code.INVALID_REQUEST, message, param=request.source)
    return texts
