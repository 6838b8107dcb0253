"""Body of /v1/batches, and the expiration policy of files, in OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from broker.dialects.body import MetadataPairs, convert, decode, extra_schema, wrong

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""Endpoints that a batch may have."""
WINDOW = "24h"
ANCHOR = "created_at"
EXPIRES_S_MIN, EXPIRES_S_MAX = 3600, 30 * 24 * 3600


class ExpiresAfter(Struct):
    """Expiration policy of files. `seconds` after they were created."""

    anchor: Annotated[str, extra_schema(const=ANCHOR)]
    seconds: Annotated[int, Meta(ge=EXPIRES_S_MIN, le=EXPIRES_S_MAX)]


class BatchBody(Struct, kw_only=True):
    """Body that creates a batch."""

    input_file_id: str
    endpoint: Annotated[str, extra_schema(enum=[*ENDPOINTS])]
    completion_window: Annotated[str, extra_schema(const=WINDOW)]
    metadata: MetadataPairs | None = None
    output_expires_after: ExpiresAfter | None = None


_decoder = msgspec.json.Decoder(BatchBody)


def read_batch(raw: bytes) -> BatchBody:
    """Decode and check a body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_decoder, raw)
    if body.endpoint not in ENDPOINTS:
        raise wrong("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    if body.completion_window != WINDOW:
        raise wrong("completion_window", f"must be '{WINDOW}'")
    if body.output_expires_after is not None:
        _check_anchor(body.output_expires_after, "output_expires_after")
    return body


def read_expiry(fields: Mapping[str, str]) -> int | None:
    """Return the age in seconds at which an uploaded file expires; None if the form has none."""
    names = ("expires_after[anchor]", "expires_after[seconds]")
    anchor, seconds = (fields.get(name) for name in names)
    if anchor is None and seconds is None:
        return None
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise wrong(names[1], "must be a number")
    policy = convert({"anchor": anchor or "", "seconds": int(seconds)}, ExpiresAfter, "expires_after")
    _check_anchor(policy, "expires_after")
    return policy.seconds


def _check_anchor(policy: ExpiresAfter, name: str) -> None:
    if policy.anchor != ANCHOR:
        raise wrong(f"{name}.anchor", f"must be '{ANCHOR}'")


# --- Body of /v1/messages/batches --------------------------------------------------------------------

LINES_MAX = 50_000
"""Maximum number of requests of a batch, in every API."""


class BatchRequest(Struct, frozen=True):
    """A request of a batch. `params`: the body of a message request, which is parsed when it runs."""

    custom_id: str
    params: Raw


class MessageBatchBody(Struct, kw_only=True):
    """Body that creates a batch."""

    requests: Annotated[list[BatchRequest], Meta(min_length=1, max_length=LINES_MAX)]


_batch_decoder = msgspec.json.Decoder(MessageBatchBody)


def read_requests(raw: bytes) -> list[BatchRequest]:
    """Decode a body. Raises `RequestError` naming the parameter at fault."""
    return decode(_batch_decoder, raw, is_sized=False).requests
