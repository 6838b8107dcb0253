"""The table of errors that clients can receive: code -> HTTP status, retryable or not, default message."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """The `code` in a client's error object. Part of the public API: never renamed."""

    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNSUPPORTED_MEDIA = "unsupported_media"
    INVALID_MEDIA = "invalid_media"
    INVALID_API_KEY = "invalid_api_key"
    ORIGIN_NOT_ALLOWED = "origin_not_allowed"
    MODEL_NOT_FOUND = "model_not_found"
    ADAPTER_NOT_FOUND = "adapter_not_found"
    RESPONSE_NOT_FOUND = "response_not_found"
    PREVIOUS_RESPONSE_NOT_FOUND = "previous_response_not_found"
    CONVERSATION_NOT_FOUND = "conversation_not_found"
    FILE_NOT_FOUND = "file_not_found"
    BATCH_NOT_FOUND = "batch_not_found"
    ROUTE_NOT_FOUND = "route_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    WEBSOCKET_UNSUPPORTED = "websocket_unsupported"
    REQUEST_TIMEOUT = "request_timeout"
    REQUEST_TOO_LARGE = "request_too_large"
    UNSUPPORTED_CONTENT_TYPE = "unsupported_content_type"
    UNSUPPORTED_CONTENT_ENCODING = "unsupported_content_encoding"
    HOST_NOT_ALLOWED = "host_not_allowed"
    HEADERS_TOO_LARGE = "headers_too_large"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    TEXT_GENERATION_BUSY = "text_generation_busy"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    MODEL_LOADING = "model_loading"
    MODEL_IN_USE = "model_in_use"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    STREAM_CURSOR_EXPIRED = "stream_cursor_expired"
    MODEL_FAILED = "model_failed"
    WORKER_UNAVAILABLE = "worker_unavailable"
    WORKER_CRASHED = "worker_crashed"
    SHUTTING_DOWN = "shutting_down"
    CLIENT_TOO_SLOW = "client_too_slow"
    REQUEST_CANCELLED = "request_cancelled"
    ENGINE_ERROR = "engine_error"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    STORAGE_FAILED = "storage_failed"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class Kind:
    """HTTP status and default message of a code."""

    status: int
    retryable: bool
    wording: str


_CALLER = {
    Code.INVALID_REQUEST: (400, "The request is invalid."),
    Code.UNSUPPORTED_PARAMETER: (400, "A parameter of this request is not supported."),
    Code.CONTEXT_LENGTH_EXCEEDED: (400, "The prompt is longer than the model's context."),
    Code.UNSUPPORTED_MEDIA: (400, "This model does not support this kind of input."),
    Code.INVALID_MEDIA: (400, "An image or file in this request cannot be read."),
    Code.INVALID_API_KEY: (401, "A valid API key is required."),
    Code.ORIGIN_NOT_ALLOWED: (403, "Web pages of this origin may not use the server."),
    Code.MODEL_NOT_FOUND: (404, "The model does not exist."),
    Code.ADAPTER_NOT_FOUND: (404, "The model has no such adapter."),
    Code.RESPONSE_NOT_FOUND: (404, "The response does not exist or is no longer stored."),
    Code.CONVERSATION_NOT_FOUND: (404, "The conversation or its item does not exist or is no longer stored."),
    Code.PREVIOUS_RESPONSE_NOT_FOUND: (400, "The previous response does not exist or is no longer stored."),
    Code.FILE_NOT_FOUND: (404, "The file does not exist or is no longer stored."),
    Code.BATCH_NOT_FOUND: (404, "The batch does not exist or is no longer stored."),
    Code.ROUTE_NOT_FOUND: (404, "This URL path does not exist."),
    Code.METHOD_NOT_ALLOWED: (405, "This URL path does not support this method."),
    Code.REQUEST_TIMEOUT: (408, "The request did not arrive in time."),
    Code.MODEL_IN_USE: (409, "The model has requests in flight."),
    Code.IDEMPOTENCY_KEY_REUSED: (409, "The idempotency key was used for another request."),
    Code.STREAM_CURSOR_EXPIRED: (409, "The events of this response are no longer kept."),
    Code.REQUEST_TOO_LARGE: (413, "The request body is too large."),
    Code.UNSUPPORTED_CONTENT_TYPE: (415, "The request's content type is not supported."),
    Code.UNSUPPORTED_CONTENT_ENCODING: (415, "The encoding of the request body is not supported."),
    Code.HOST_NOT_ALLOWED: (421, "The server does not answer as this host."),
    Code.WEBSOCKET_UNSUPPORTED: (426, "This server has no WebSockets."),
    Code.HEADERS_TOO_LARGE: (431, "The request's headers are too many or too large."),
    Code.REQUEST_CANCELLED: (499, "The request was cancelled by an operator of this server."),
}
_RETRY = {
    Code.RATE_LIMIT_EXCEEDED: (429, "This API key has reached its limit of requests in flight."),
    Code.TEXT_GENERATION_BUSY: (503, "The server is at capacity."),
    Code.TOO_MANY_CONNECTIONS: (503, "The server has reached its connection limit."),
    Code.MODEL_LOADING: (503, "The model is still loading."),
    Code.WORKER_UNAVAILABLE: (503, "No worker serves this model right now."),
    Code.SHUTTING_DOWN: (503, "The server is shutting down."),
}
_OURS = {
    Code.MODEL_FAILED: (503, "The model cannot be loaded."),
    Code.WORKER_CRASHED: (500, "This request crashes its worker."),
    Code.CLIENT_TOO_SLOW: (500, "The client did not read its stream in time."),
    Code.ENGINE_ERROR: (500, "The model failed on this request."),
    Code.DEADLINE_EXCEEDED: (504, "The request did not finish before its deadline."),
    Code.STORAGE_FAILED: (507, "The server cannot store this."),
    Code.INTERNAL_ERROR: (500, "An internal server error occurred."),
}

KINDS: dict[Code, Kind] = {
    code: Kind(status, retryable, wording)
    for table, retryable in ((_CALLER, False), (_RETRY, True), (_OURS, False))
    for code, (status, wording) in table.items()
}


class RequestError(Exception):
    """An error that ends a request and is reported to its client.

    `param` is the invalid field as the client spells it; `retry_after_s` is sent as Retry-After.
    """

    def __init__(
        self,
        code: Code,
        message: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: dict[str, object] | None = None,
    ) -> None:
        self.code = code
        self.kind = KINDS[code]
        self.message = message or self.kind.wording
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = details or {}
        super().__init__(f"{code}: {self.message}")


def adapter_not_found(model: str, adapter: str) -> RequestError:
    """Return the error for an adapter that a model does not have."""
    message = f"The model `{model}` has no adapter `{adapter[:100]}`."
    return RequestError(Code.ADAPTER_NOT_FOUND, message, param="adapter")


def code_named(name: str) -> Code:
    """Return the code that a peer sent; one that this version does not know becomes `internal_error`."""
    try:
        return Code(name)
    except ValueError:
        return Code.INTERNAL_ERROR


def too_long(
    context_length: int, tokens: int, source: str, *, by_memory: bool, is_partial: bool = False
) -> RequestError:
    """Return the error for a prompt of `tokens` tokens. `by_memory`: the limit is memory, not the model.
    `is_partial`: it has more than that, which were not counted."""
    where = " in the memory of this server" if by_memory else ""
    count = f"more than {tokens}" if is_partial else str(tokens)
    return RequestError(
        Code.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {context_length} tokens{where}. However, your {source} "
        f"resulted in {count} tokens. Please reduce the length of the {source}.",
        param=source,
        details={"prompt_tokens": tokens + is_partial, "context_length": context_length},
    )
