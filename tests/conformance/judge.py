"""Rules for responses to generated requests. It uses only the standard library, because it runs in
schemathesis's environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ANTHROPICS = "/v1/messages"
METRICS = "/metrics"
PAGE = "/"
FILES = {
    "/v1/files/{id}/content": "application/octet-stream",
    "/v1/messages/batches/{id}/results": "application/x-jsonl",
}
"""Paths whose success is a file, and its type."""
ENDS = (
    "message_stop", "error", "response.completed", "response.incomplete", "response.failed", "model", "pull",
)  # fmt: skip
"""Types of the last event of a stream. Those of a model or a download have no others."""


def complaint(path: str, status: int, headers: Mapping[str, str], body: bytes, *, is_head: bool) -> str:
    """Return what is wrong with a response, or an empty string. `headers`: by lower-case name."""
    if status >= 500 and status != 503:
        return f"status {status}: {body[:300]!r}"
    if status == 503 and "retry-after" not in headers:
        return "503 without Retry-After"
    if "x-request-id" not in headers:
        return "no request id"
    if is_head:
        return "a HEAD that has a body" if body else ""
    kind = headers.get("content-type", "")
    if status < 300 and kind.startswith("text/event-stream"):
        return _of_stream(body)
    if path == METRICS and status == 200:
        return _of_metrics(kind, body)
    if path == PAGE and status == 200:
        well = kind.startswith("text/html") and body.startswith(b"<!doctype html>")
        return "" if well else f"no page: {kind!r}, {body[:300]!r}"
    if status == 200 and kind == FILES.get(path):
        return ""
    if not kind.startswith("application/json"):
        return f"status {status} of type {kind!r}"
    return _of_document(path, status, json.loads(body))


def _of_stream(body: bytes) -> str:
    """Check that all events contain JSON and that the last one ends the stream."""
    lines = body.decode().split("\n")
    told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if not told or (told[-1] != "[DONE]" and not _is_end(json.loads(told[-1]))):
        return f"a stream without an end: {body[-300:]!r}"
    for data in told:
        if data != "[DONE]":
            json.loads(data)
    return ""


def _of_metrics(kind: str, body: bytes) -> str:
    *lines, last = body.decode().split("\n")
    well = kind.startswith("text/plain") and not last and all(" " in line for line in lines)
    return "" if well else f"no metrics: {kind!r}, {body[:300]!r}"


def _is_end(event: Any) -> bool:
    return event.get("type") in ENDS


def _of_document(path: str, status: int, document: Any) -> str:
    if status < 300:
        return "an error object with a success status" if document.get("error") else ""
    if path.startswith(ANTHROPICS):
        return _of_anthropics(document)
    error = document.get("error")
    if not isinstance(error, dict) or not error.keys() >= {"message", "type", "param", "code"}:
        return f"no error object: {document}"
    return "" if error["message"] and error["code"] else f"an error without message or code: {document}"


def _of_anthropics(document: Any) -> str:
    error = document.get("error")
    if document.keys() != {"type", "error", "request_id"} or document["type"] != "error":
        return f"not Anthropic's error envelope: {document}"
    well = isinstance(error, dict) and error.keys() == {"type", "message"} and all(error.values())
    return "" if well else f"no error object: {document}"
