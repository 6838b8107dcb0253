"""Error table: complete, consistent, and part of the public interface."""

from __future__ import annotations

from protocol.errors import KINDS, Code, code_named

# Public interface: name -> status, retryable. A change here breaks clients' error handlers.
PUBLIC = {
    "invalid_request": (400, False), "unsupported_parameter": (400, False),
    "context_length_exceeded": (400, False), "unsupported_media": (400, False),
    "invalid_media": (400, False), "invalid_api_key": (401, False), "origin_not_allowed": (403, False),
    "model_not_found": (404, False), "route_not_found": (404, False), "method_not_allowed": (405, False),
    "websocket_unsupported": (426, False), "unsupported_content_encoding": (415, False),
    "request_timeout": (408, False), "model_in_use": (409, False), "idempotency_key_reused": (409, False),
    "stream_cursor_expired": (409, False), "request_too_large": (413, False),
    "unsupported_content_type": (415, False), "host_not_allowed": (421, False),
    "headers_too_large": (431, False), "request_cancelled": (499, False),
    "rate_limit_exceeded": (429, True), "text_generation_busy": (503, True),
    "too_many_connections": (503, True), "model_loading": (503, True), "worker_unavailable": (503, True),
    "worker_crashed": (500, False), "shutting_down": (503, True), "client_too_slow": (500, False),
    "engine_error": (500, False), "deadline_exceeded": (504, False), "internal_error": (500, False),
}  # fmt: skip


def test_a_published_code_keeps_its_name_status_and_advice() -> None:
    kinds = {name: KINDS[Code(name)] for name in PUBLIC}
    assert {name: (kind.status, kind.retryable) for name, kind in kinds.items()} == PUBLIC


def test_every_code_stands_in_the_table_and_is_found_by_its_name() -> None:
    assert set(KINDS) == set(Code)
    for code, kind in KINDS.items():
        assert code_named(str(code)) is code
        assert code.value == code.name.lower()
        assert kind.wording.endswith(".")
        # A model that failed to load is unavailable, but is not tried again before a minute has passed.
        assert kind.retryable == (kind.status in (429, 503) and code is not Code.MODEL_FAILED)
    for name in ("", "ENGINE_ERROR", "a_later_code", "engine_error ", "\0"):
        assert code_named(name) is Code.INTERNAL_ERROR
