"""Objects that OpenAI's APIs share: errors and token usage."""

from __future__ import annotations

from typing import Any

from protocol.errors import KINDS, RequestError, code_named
from protocol.messages import Failed
from protocol.types import Usage


def failure(failed: Failed) -> RequestError:
    """Return the error of a failed flight, for its client."""
    code = code_named(failed.code)
    retry = 1.0 if KINDS[code].retryable else None
    details: dict[str, object] = dict(failed.details)
    message = failed.message or None
    return RequestError(code, message, param=failed.param, retry_after_s=retry, details=details)


def error_object(error: RequestError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    status = error.kind.status
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if status == 429 else kind
    body = {"message": error.message, "type": kind, "param": error.param, "code": str(error.code)}
    return {"error": body | error.details}


def usage_object(usage: Usage) -> dict[str, Any]:
    document: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.sparse_tokens:
        document["prompt_tokens_details"]["sparse_tokens"] = usage.sparse_tokens
    details = {
        "reasoning_tokens": usage.reasoning_tokens,
        "accepted_prediction_tokens": usage.accepted_tokens,
        "rejected_prediction_tokens": usage.rejected_tokens,
    }
    if any(details.values()):
        document["completion_tokens_details"] = {name: count for name, count in details.items() if count}
    return document
