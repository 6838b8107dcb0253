"""Lines of batches: each fault has a code and a place, and the rest of the file is read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from broker.api.batches import lines
from broker.api.batches.lines import (
    FileCheck,
    LineAnswer,
    LineError,
    answered,
    read_line,
    unanswered,
    with_seed,
)
from broker.api.batches.records import BatchRecord
from tests.broker.api.batches.test_store import CHAT, batch_record

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}}


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b"[]", "invalid_request", None),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/embeddings"}, "invalid_url", "url"),
        ({"custom_id": ""}, "invalid_value", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_value", "custom_id"),
        ({"body": []}, "invalid_request", "body"),
        ({"body": {"model": 1}}, "invalid_type", "body.model"),
        ({"body": {"stream": True}}, "invalid_value", "body.stream"),
        ({"body": {"background": True}}, "invalid_value", "body.background"),
    ],
)
def test_a_line_that_cannot_run_says_why(raw: bytes | dict[str, Any], code: str, param: str | None) -> None:
    text = raw if isinstance(raw, bytes) else json.dumps(GOOD | raw).encode()
    with pytest.raises(LineError) as caught:
        read_line(text, 1, "openai", CHAT)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_a_file_is_checked_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    check = FileCheck("openai", CHAT)
    for id in ("a", "b", "a"):
        check.add(json.dumps(GOOD | {"custom_id": id}).encode())
    check.end()
    assert (check.total, check.model) == (3, "m")
    assert [(fault.code, fault.line) for fault in check.faults] == [("duplicate_custom_id", 3)]
    monkeypatch.setattr(lines, "LINES_MAX", 2)
    check.end()
    assert [fault.code for fault in check.faults] == ["too_many_requests", "duplicate_custom_id"]
    empty = FileCheck("anthropic", lines.MESSAGES)
    empty.end()
    assert [fault.code for fault in empty.faults] == ["empty_file"]


@pytest.mark.parametrize("body", [b"{}", b'{"model": "m" }\n', b'{"seed": null}', b'{"seed": -1}'])
def test_a_line_without_a_seed_gets_one(body: bytes) -> None:
    assert json.loads(with_seed(body, 7, CHAT))["seed"] == 7
    assert with_seed(body, 7, "/v1/embeddings") == body
    assert with_seed(b'{"seed": 1}', 7, CHAT) == b'{"seed": 1}'


def test_each_line_has_its_result() -> None:
    batch = batch_record("batch_1", "file-1")
    line = read_line(json.dumps(GOOD).encode(), 4, "openai", CHAT)
    found = json.loads(answered(batch, line, LineAnswer(400, "req_1", b'{"error": {}}')))
    response = {"status_code": 400, "request_id": "req_1", "body": {"error": {}}}
    assert found == {"id": "batch_req_1_4", "custom_id": "a", "response": response, "error": None}

    def ended(batch: BatchRecord, **fields: Any) -> Any:
        result = unanswered(msgspec.structs.replace(batch, **fields), line)
        return None if result is None else json.loads(result)

    assert ended(batch, ending="cancelled") is None
    assert ended(batch, ending="expired")["error"]["code"] == "batch_expired"
    for ending, kind in (("expired", "expired"), ("cancelled", "canceled")):
        result = {"custom_id": "a", "result": {"type": kind}}
        assert ended(batch, dialect="anthropic", ending=ending) == result
