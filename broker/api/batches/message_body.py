"""Body of /v1/messages/batches."""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from protocol.errors import Code, RequestError

LINES_MAX = 50_000
"""Maximum number of requests of a batch, in every API."""


class BatchRequest(Struct, frozen=True):
    """A request of a batch. `params`: the body of a message request, which is parsed when it runs."""

    custom_id: str
    params: Raw


class MessageBatchBody(Struct, kw_only=True):
    """Body that creates a batch."""

    requests: list[BatchRequest]


_decoder = msgspec.json.Decoder(MessageBatchBody)


def read_requests(raw: bytes) -> list[BatchRequest]:
    """Decode a body. Raises `RequestError` naming the parameter at fault."""
    try:
        requests = _decoder.decode(raw).requests
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(Code.INVALID_REQUEST, f"requests: {error}.", param="requests") from None
    if not 1 <= len(requests) <= LINES_MAX:
        message = f"'requests' must have 1 to {LINES_MAX} items."
        raise RequestError(Code.INVALID_REQUEST, message, param="requests")
    return requests
