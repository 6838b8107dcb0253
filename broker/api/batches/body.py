"""Body of /v1/batches, and the expiration policy of files, in OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from broker.dialects.body import check_range, decode
from protocol.errors import Code, RequestError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""Endpoints that a batch may have."""
WINDOW = "24h"
METADATA_PAIRS_MAX, METADATA_KEY_CHARS_MAX, METADATA_VALUE_CHARS_MAX = 16, 64, 512
EXPIRES_S_MIN, EXPIRES_S_MAX = 3600, 30 * 24 * 3600


class ExpiresAfter(Struct):
    """Expiration policy of files. `seconds` after they were created."""

    anchor: str
    seconds: int


class BatchBody(Struct, kw_only=True):
    """Body that creates a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


_decoder = msgspec.json.Decoder(BatchBody)


def read_batch(raw: bytes) -> BatchBody:
    """Decode and check a body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_decoder, raw)
    if body.endpoint not in ENDPOINTS:
        raise _wrong("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    if body.completion_window != WINDOW:
        raise _wrong("completion_window", f"must be '{WINDOW}'")
    _check_metadata(body.metadata or {})
    if body.output_expires_after is not None:
        _check_expiry(body.output_expires_after, "output_expires_after")
    return body


def read_expiry(fields: Mapping[str, str]) -> int | None:
    """Return the age in seconds at which an uploaded file expires; None if the form has none."""
    names = ("expires_after[anchor]", "expires_after[seconds]")
    anchor, seconds = (fields.get(name) for name in names)
    if anchor is None and seconds is None:
        return None
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise _wrong(names[1], "must be a number")
    policy = ExpiresAfter(anchor or "", int(seconds))
    _check_expiry(policy, "expires_after")
    return policy.seconds


def _check_expiry(policy: ExpiresAfter, name: str) -> None:
    if policy.anchor != "created_at":
        raise _wrong(f"{name}.anchor", "must be 'created_at'")
    check_range(f"{name}.seconds", policy.seconds, EXPIRES_S_MIN, EXPIRES_S_MAX)


def _check_metadata(pairs: Mapping[str, str]) -> None:
    if len(pairs) > METADATA_PAIRS_MAX:
        raise _wrong("metadata", f"must have at most {METADATA_PAIRS_MAX} keys")
    for key, value in pairs.items():
        if len(key) > METADATA_KEY_CHARS_MAX or len(value) > METADATA_VALUE_CHARS_MAX:
            limits = f"{METADATA_KEY_CHARS_MAX} and {METADATA_VALUE_CHARS_MAX}"
            raise _wrong("metadata", f"must have keys and values of at most {limits} characters")


def _wrong(name: str, why: str) -> RequestError:
    return RequestError(Code.INVALID_REQUEST, f"'{name}' {why}.", param=name)
