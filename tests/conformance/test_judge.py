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
METRICS, PROMETHEUS = b'# TYPE a counter\na{code="200"} 1.0\n', "text/plain; version=0.0.4"
PAGE, HTML = b"<!doctype html>\n<title>a</title>", "text/html; charset=utf-8"


def said(path: str, status: int, body: Any, kind: str = JSON, *, is_head: bool = False, **more: str) -> str:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return complaint(path, status, {"content-type": kind, "x-request-id": "r", **more}, raw, is_head=is_head)


@pytest.mark.parametrize(
    ("path", "status", "body", "kind"),
    [
        (CHAT, 200, {"id": "a"}, JSON),
        (CHAT, 400, OPENAIS, JSON),
        (MESSAGES, 400, ANTHROPICS, JSON),
        (CHAT, 200, b'data: {"a":1}\n\ndata: [DONE]\n\n', EVENTS),
        (MESSAGES, 200, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', EVENTS),
        ("/metrics", 200, METRICS, PROMETHEUS),
        ("/", 200, PAGE, HTML),
    ],
)
def test_valid_responses_pass(path: str, status: int, body: Any, kind: str) -> None:
    assert not said(path, status, body, kind)


def test_overload_passes_if_it_says_when_to_come_again_and_a_head_without_a_body() -> None:
    assert not said(CHAT, 503, OPENAIS, **{"retry-after": "1"})
    assert not said("/", 200, b"", "", is_head=True)


@pytest.mark.parametrize(
    ("path", "status", "body", "kind"),
    [
        ("/metrics", 200, METRICS, JSON),
        ("/", 200, b"gone", HTML),
        *((CHAT, status, OPENAIS, JSON) for status in (500, 503)),
        (CHAT, 400, ANTHROPICS, JSON),
        (MESSAGES, 400, OPENAIS, JSON),
        (CHAT, 400, {"error": OPENAIS["error"] | {"message": ""}}, JSON),
        (CHAT, 400, OPENAIS, "text/plain"),
        (CHAT, 200, OPENAIS, JSON),
        *((CHAT, 200, body, EVENTS) for body in (b"", b'data: {"a":1}\n\n', b": keep-alive\n\n")),
    ],
)
def test_failures_of_ours_and_other_shapes_do_not_pass(path: str, status: int, body: Any, kind: str) -> None:
    assert said(path, status, body, kind)


def test_an_answer_without_a_request_id_and_a_head_with_a_body_do_not_pass() -> None:
    assert complaint(CHAT, 200, {"content-type": JSON}, b"{}", is_head=False) == "no request id"
    assert said("/health", 200, b"{}", is_head=True)
