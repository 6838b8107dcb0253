"""Error objects of Anthropic's API."""

from __future__ import annotations

import pytest

from broker.dialects.messages.errors import error_object
from broker.dialects.openai import failure
from protocol.errors import KINDS, Code, RequestError
from tests.factories import failed

TYPES = {
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
    "request_too_large", "rate_limit_error", "timeout_error", "api_error", "overloaded_error",
}  # fmt: skip


@pytest.mark.parametrize("code", Code)
def test_every_error_has_a_type_that_anthropics_clients_know(code: Code) -> None:
    document = error_object(RequestError(code, "Because."), "req_1")
    kind = document["error"]["type"]
    told = {"type": kind, "message": "Because."}
    assert document == {"type": "error", "error": told, "request_id": "req_1"}
    assert kind in TYPES
    # A retryable error has a type that means temporary load.
    assert (kind in ("overloaded_error", "rate_limit_error")) == KINDS[code].retryable


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.INVALID_REQUEST, "invalid_request_error"),
        (Code.INVALID_API_KEY, "authentication_error"),
        (Code.MODEL_NOT_FOUND, "not_found_error"),
        (Code.REQUEST_TOO_LARGE, "request_too_large"),
        (Code.RATE_LIMIT_EXCEEDED, "rate_limit_error"),
        (Code.TEXT_GENERATION_BUSY, "overloaded_error"),
        (Code.ENGINE_ERROR, "api_error"),
        (Code.DEADLINE_EXCEEDED, "timeout_error"),
    ],
)
def test_the_type_follows_from_the_status(code: Code, kind: str) -> None:
    assert error_object(RequestError(code))["error"]["type"] == kind


def test_the_message_names_the_parameter_once() -> None:
    told = [
        error_object(RequestError(Code.INVALID_MEDIA, message, param="messages[0]"))["error"]["message"]
        for message in ("Not an image.", "'messages[0]' is no image.")
    ]
    assert told == ["messages[0]: Not an image.", "'messages[0]' is no image."]


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know() -> None:
    numbers = {"prompt_tokens": 9000, "context_length": 8192}
    said = failed(code="context_length_exceeded", message="Too long.", details=numbers)
    assert error_object(failure(said))["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 9000 tokens > 8192 maximum",
    }
