"""Error objects of Anthropic's API."""

from __future__ import annotations

import pytest

from broker.dialects.messages.errors import error_object
from broker.dialects.openai import failure
from protocol.errors import KINDS, Code, RequestError
from tests.factories import failed

TYPES = {
    Code.INVALID_REQUEST: "invalid_request_error",
    Code.INVALID_API_KEY: "authentication_error",
    Code.MODEL_NOT_FOUND: "not_found_error",
    Code.REQUEST_TOO_LARGE: "request_too_large",
    Code.RATE_LIMIT_EXCEEDED: "rate_limit_error",
    Code.TEXT_GENERATION_BUSY: "overloaded_error",
    Code.ENGINE_ERROR: "api_error",
    Code.DEADLINE_EXCEEDED: "timeout_error",
}
OTHERS = {"permission_error"}


@pytest.mark.parametrize("code", Code)
def test_every_error_has_a_type_that_anthropics_clients_know(code: Code) -> None:
    document = error_object(RequestError(code, "Because."), "req_1")
    kind = document["error"]["type"]
    told = {"type": kind, "message": "Because."}
    assert document == {"type": "error", "error": told, "request_id": "req_1"}
    assert kind == TYPES.get(code, kind)
    assert kind in {*TYPES.values(), *OTHERS}
    # A retryable error has a type that means temporary load.
    assert (kind in ("overloaded_error", "rate_limit_error")) == KINDS[code].retryable


def test_messages_are_in_the_words_that_agents_know() -> None:
    """The parameter is named once; a prompt that is too long has Anthropic's wording."""
    for message in ("Not an image.", "'messages[0]' is no image."):
        told = error_object(RequestError(Code.INVALID_MEDIA, message, param="messages[0]"))
        assert told["error"]["message"].count("messages[0]") == 1
    numbers = {"prompt_tokens": 9000, "context_length": 8192}
    said = failed(code="context_length_exceeded", message="Too long.", details=numbers)
    message = error_object(failure(said))["error"]["message"]
    assert message == "prompt is too long: 9000 tokens > 8192 maximum"
