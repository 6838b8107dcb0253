"""Objects that OpenAI's APIs share: errors and token usage."""

from __future__ import annotations

from typing import Any

from protocol.errors import KINDS, RequestError, code_named
from protocol.messages import Failed
from protocol.types import Timings, Usage


def failure(failed: Failed) -> RequestError:
    """Return the error of a failed flight, for its client."""
    code = code_named(failed.code)
    retry = failed.retry_after_s
    if retry is None and KINDS[code].retryable:
        retry = 1.0
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
    """Return OpenAI's `usage` of a chat answer or completion. Details are absent if they are 0.

    `sparse_tokens` is ours. Responses and messages have a `usage_object` of their own.
    """
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


def timings_object(usage: Usage, timings: Timings) -> dict[str, Any] | None:
    """Return llama.cpp's `timings` of an answer; None: they are not known, as after a failover.

    As there, `prompt_n` is without the cached tokens, and the fields of drafts are absent without drafts.
    """
    if not (timings.prefill_s or timings.decode_s):
        return None
    run = usage.prompt_tokens - usage.cached_tokens - usage.sparse_tokens
    document: dict[str, Any] = {
        "cache_n": usage.cached_tokens,
        **_pace("prompt", run, timings.prefill_s),
        **_pace("predicted", usage.completion_tokens, timings.decode_s),
    }
    if drafted := usage.accepted_tokens + usage.rejected_tokens:
        document |= {"draft_n": drafted, "draft_n_accepted": usage.accepted_tokens}
    return document


def _pace(phase: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{phase}_n": count,
        f"{phase}_ms": round(seconds * 1000, 3),
        f"{phase}_per_token_ms": round(seconds * 1000 / count, 3) if count else 0.0,
        f"{phase}_per_second": round(count / seconds, 3) if seconds else 0.0,
    }
