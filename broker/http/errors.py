"""How an error is told over HTTP: as the API that was asked writes one, and whether to try again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from broker.dialects import openai
from broker.dialects.body import encode
from broker.dialects.messages import errors as anthropic
from broker.http.ids import request_id
from broker.http.timing import ERROR_CODE
from protocol.errors import Code, RequestError

Envelope = Callable[[RequestError, str], dict[str, Any]]
"""(error, the request's id) -> document."""

ENVELOPES: tuple[tuple[str, Envelope], ...] = (
    ("/v1/messages", anthropic.error_object),
    ("", lambda error, request_id: openai.error_object(error)),
)
"""By how a path begins; the first that fits counts."""


def error_response(error: RequestError, scope: Scope | None = None) -> Response:
    """`scope`: of what was asked for; None where that is not known."""
    path, id = (scope["path"], request_id(scope)) if scope else ("", "")
    if scope:
        scope.setdefault("state", {})[ERROR_CODE] = error.code.value
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif error.kind.status >= 500 and not error.kind.retryable:
        headers["x-should-retry"] = "false"
    if error.code is Code.REQUEST_TOO_LARGE:
        headers["connection"] = "close"
    envelope = next(envelope for beginning, envelope in ENVELOPES if path.startswith(beginning))
    return Response(encode(envelope(error, id)), error.kind.status, headers, media_type="application/json")
