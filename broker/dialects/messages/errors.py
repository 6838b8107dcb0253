"""How Anthropic's API tells an error, and what of ours its clients look for."""

from __future__ import annotations

from typing import Any

from protocol.errors import Code, RequestError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status. Anthropic's own servers say 529 where ours say 503: its SDKs try again after either, and
whatever is between us and a client knows what a 503 with a Retry-After means."""


def error_object(error: RequestError, request_id: str = "") -> dict[str, Any]:
    """The error object, in its envelope. The envelope has no place for a parameter: the message names it."""
    status = error.kind.status
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    document: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": _message(error)}}
    return document | ({"request_id": request_id} if request_id else {})


def _message(error: RequestError) -> str:
    tokens, most = (error.details.get(name) for name in ("prompt_tokens", "context_length"))
    if error.code is Code.CONTEXT_LENGTH_EXCEEDED and tokens is not None:
        # By this wording agents know that they have to make their conversation shorter.
        return f"prompt is too long: {tokens} tokens > {most} maximum"
    if error.param and error.param not in error.message:
        return f"{error.param}: {error.message}"
    return error.message
