"""The texts of an `Embed` or a `Rank`, packed when the request is made: see `protocol.conversation`."""

from __future__ import annotations

import msgspec

from protocol.errors import Code, RequestError
from protocol.messages import Embed, Rank
from protocol.parts import Token

Text = str | list[Token]
"""Or the tokens that stand for one."""

FLOAT_BYTES = 4
"""Of each number in an answer."""

_decoder: msgspec.msgpack.Decoder[list[Text]] = msgspec.msgpack.Decoder(list[Text])


def unpack(request: Embed | Rank) -> list[Text]:
    """Raises `RequestError(invalid_request)` for what are no texts, or not as many as are announced."""
    try:
        texts = _decoder.decode(request.texts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"The texts cannot be read: {error}."
        raise RequestError(Code.INVALID_REQUEST, message, param=request.source) from None
    if len(texts) != request.count:
        message = f"There are {len(texts)} texts, and {request.count} are announced."
        raise RequestError(Code.INVALID_REQUEST, message, param=request.source)
    return texts
