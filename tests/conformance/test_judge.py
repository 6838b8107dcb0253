"""The judge of responses to generated requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.dialects.messages import errors as anthropic
from broker.dialects.openai import error_object
from protocol.errors import Code, RequestError
from tests.conformance.judge import complaint

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ERROR = RequestError(Code.INVALID_REQUEST, "It is wrong.")
OPENAIS, ANTHROPICS = error_object(ERROR), anthropic.error_object(ERROR, "id")
JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"


def said(path: str, status: int, body: Any, kind: str = JSON, **more: Any) -> str:
    headers = {"content-type": kind, "x-request-id": "r"} | more.pop("headers", {})
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return complaint(path, status, headers, raw, is_head=more.get("is_head", False))


def test_valid_responses_pass() -> None:
    assert not said(CHAT, 200, {"id": "a"})
    assert not said(CHAT, 400, OPENAIS)
    assert not said(MESSAGES, 400, ANTHROPICS)
    assert not said(CHAT, 503, OPENAIS, headers={"retry-after": "1"})
    assert not said("/", 200, b"", kind="", is_head=True)
    assert not said(CHAT, 200, b'data: {"a":1}\n\ndata: [DONE]\n\n', EVENTS)
    assert not said(MESSAGES, 200, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', EVENTS)


def test_metrics_are_lines_of_text_and_nowhere_else() -> None:
    text, kind = b'# TYPE a counter\na{code="200"} 1.0\n', "text/plain; version=0.0.4"
    assert not said("/metrics", 200, text, kind)
    assert said("/metrics", 200, text, JSON)
    assert said("/metrics", 200, text + b"cut", kind)
    assert said("/metrics", 200, {"a": 1})
    assert said(CHAT, 200, text, kind)
    assert not said("/metrics", 401, OPENAIS)


def test_the_page_is_html_and_nothing_else_is() -> None:
    page, kind = b"<!doctype html>\n<title>a</title>", "text/html; charset=utf-8"
    assert not said("/", 200, page, kind)
    assert said("/", 200, {"a": 1})
    assert said("/", 200, b"gone", kind)
    assert said(CHAT, 200, page, kind)
    assert not said("/", 404, OPENAIS)


@pytest.mark.parametrize("status", [500, 501, 502, 504])
def test_no_failure_of_ours_passes_but_a_503(status: int) -> None:
    assert str(status) in said(CHAT, status, OPENAIS)


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        (CHAT, 503, OPENAIS),
        (CHAT, 400, ANTHROPICS),
        (MESSAGES, 400, OPENAIS),
        (MESSAGES, 400, {**ANTHROPICS, "error": {"type": "", "message": "m"}}),
        (CHAT, 400, {"error": "m"}),
        (CHAT, 400, {"error": OPENAIS["error"] | {"message": ""}}),
        (CHAT, 200, OPENAIS),
    ],
)
def test_errors_of_another_shape_do_not_pass(path: str, status: int, body: Any) -> None:
    assert said(path, status, body)


@pytest.mark.parametrize("body", [b"", b'data: {"a":1}\n\n', b": keep-alive\n\n"])
def test_a_stream_without_an_end_does_not_pass(body: bytes) -> None:
    assert "without an end" in said(CHAT, 200, body, EVENTS)


def test_every_answer_has_a_request_id_and_a_type_and_a_head_has_no_body() -> None:
    assert complaint(CHAT, 200, {"content-type": JSON}, b"{}", is_head=False) == "no request id"
    assert said(CHAT, 400, OPENAIS, kind="text/plain")
    assert said("/health", 200, b"{}", is_head=True)
