"""How an error is told over HTTP: as the API that was asked writes one, and whether to try again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from broker.dialects import openai
from broker.dialects.body import encode
from protocol.errors import Code, RequestError

Envelope = Callable[[RequestError], dict[str, Any]]

ENVELOPES: tuple[tuple[str, Envelope], ...] = (("", openai.error_object),)
"""By how a path begins; the first that fits counts."""


def error_response(error: RequestError, path: str = "") -> Response:
    """`path`: what was asked for; empty where that is not known."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif error.kind.status >= 500 and not error.kind.retryable:
        headers["x-should-retry"] = "false"
    if error.code is Code.REQUEST_TOO_LARGE:
        headers["connection"] = "close"
    envelope = next(envelope for beginning, envelope in ENVELOPES if path.startswith(beginning))
    return Response(encode(envelope(error)), error.kind.status, headers, media_type="application/json")
