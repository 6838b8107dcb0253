"""Body of /v1/messages/batches."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from broker.dialects.body import decode

LINES_MAX = 50_000
"""Maximum number of requests of a batch, in every API."""


class BatchRequest(Struct, frozen=True):
    """A request of a batch. `params`: the body of a message request, which is parsed when it runs."""

    custom_id: str
    params: Raw


class MessageBatchBody(Struct, kw_only=True):
    """Body that creates a batch."""

    requests: Annotated[list[BatchRequest], Meta(min_length=1, max_length=LINES_MAX)]


_decoder = msgspec.json.Decoder(MessageBatchBody)


def read_requests(raw: bytes) -> list[BatchRequest]:
    """Decode a body. Raises `RequestError` naming the parameter at fault."""
    return decode(_decoder, raw, is_sized=False).requests
