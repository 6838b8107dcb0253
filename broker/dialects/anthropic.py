"""Error objects in the format of Anthropic's API, with the wording that its clients match."""

from __future__ import annotations

from typing import Any

from protocol.errors import Code, RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types by status. Anthropic's servers send 529 instead of 503: its SDKs retry both, and proxies
understand a 503 with Retry-After."""


def error_object(error: RequestError, request_id: str = "") -> dict[str, Any]:
    """Return the error object. It has no field for the parameter, so the message names it."""
    status = error.kind.status
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if kind == "overloaded_error" and not error.kind.retryable:
        kind = "api_error"
    document: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": _message(error)}}
    return document | ({"request_id": request_id} if request_id else {})


def _message(error: RequestError) -> str:
    tokens, most = (error.details.get(name) for name in ("prompt_tokens", "context_length"))
    if error.code is Code.CONTEXT_LENGTH_EXCEEDED and tokens is not None:
        # Agents match this wording to know that they must shorten the conversation.
        return f"prompt is too long: {tokens} tokens > {most} maximum"
    if error.param and error.param not in error.message:
        return f"{error.param}: {error.message}"
    return error.message
