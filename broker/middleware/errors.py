"""Error responses: the error object of the API that was called, and headers that tell clients whether to
retry."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from broker.dialects import anthropic, openai
from broker.middleware.context import request_id
from broker.middleware.json_response import JsonResponse
from protocol.common.log_context import about
from protocol.errors import Code, RequestError

Envelope = Callable[[RequestError, str], dict[str, Any]]
"""(error, request id) -> error document."""

ENVELOPES: tuple[tuple[str, Envelope], ...] = (
    ("/v1/messages", anthropic.error_object),
    ("", lambda error, request_id: openai.error_object(error)),
)
"""Envelopes by path prefix; the first match counts."""

ERROR_CODE = "roundhouse.error_code"
"""Key of the error's code in the message that starts an error response."""
_RETRIED = frozenset({409, *range(500, 600)})
"""Statuses that SDKs retry, unless a header says that it is in vain."""


class _ErrorResponse(JsonResponse):
    """Response to an error, which tells `TimingMiddleware` the error's code."""

    def __init__(self, error: RequestError, document: dict[str, Any], headers: dict[str, str]) -> None:
        super().__init__(document, error.kind.status, headers)
        self._code = error.code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_code(message: Message) -> None:
            await send({**message, ERROR_CODE: self._code.value})

        await super().__call__(scope, receive, send_with_code)


def error_response(error: RequestError, scope: Scope | None = None) -> Response:
    """Build the response for an error. `scope`: that of the request, if known."""
    path, id = (scope["path"], request_id(scope)) if scope else ("", "")
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif error.kind.status in _RETRIED and not error.kind.retryable:
        headers["x-should-retry"] = "false"
    if error.code is Code.REQUEST_TOO_LARGE:
        headers["connection"] = "close"
    envelope = next(envelope for beginning, envelope in ENVELOPES if path.startswith(beginning))
    return _ErrorResponse(error, envelope(error, id), headers)


def log_refusal(log: logging.Logger, scope: Scope, error: RequestError) -> None:
    """Log the refusal of a request by a middleware, which no route sees."""
    client = scope["client"][0] if scope.get("client") else "?"
    line, extra = (scope["method"], scope["path"], client), about(request_id=request_id(scope))
    log.info("%s %r from %s refused: %s", *line, error.message, extra=extra)
