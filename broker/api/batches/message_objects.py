"""Batches as objects of Anthropic's API, and the body that creates one. Pure."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

import msgspec

from broker.api.batches.body import BatchRequest, read_requests
from broker.api.batches.lines import MESSAGES, FileCheck
from broker.api.batches.objects import Paging
from broker.api.batches.records import WINDOW_S, BatchRecord
from broker.dialects.body import encode
from protocol.errors import Code, RequestError

PAGING = Paging("after_id", "before_id", 20, 1000)
_SEED_BITS = 63


def read_batch(raw: bytes) -> tuple[list[bytes], FileCheck]:
    """Return the lines of a batch, checked. Raises `RequestError` naming the parameter at fault."""
    requests = read_requests(raw)
    check = FileCheck("anthropic", MESSAGES)
    lines = list(map(_line, requests))
    for line in lines:
        check.add(line)
    check.end()
    if check.faults:
        fault = check.faults[0]
        place = "requests" + (f".{fault.line - 1}" if fault.line else "")
        param = f"{place}.{fault.param}" if fault.param else place
        raise RequestError(Code.INVALID_REQUEST, f"{param}: {fault.message}", param=param)
    return lines, check


def _line(request: BatchRequest) -> bytes:
    # Compact JSON, so that a line of the file is one line.
    params = msgspec.json.format(bytes(request.params), indent=-1)
    return encode({"custom_id": request.custom_id, "params": msgspec.Raw(params)})


def new_batch(check: FileCheck, owner: str, now: float) -> BatchRecord:
    """Return a new batch, whose lines are not stored yet."""
    id = secrets.token_hex(12)
    return BatchRecord(
        id=f"msgbatch_{id}",
        owner=owner,
        dialect="anthropic",
        endpoint=MESSAGES,
        input_file_id=f"file-{id}",
        created_at=int(now),
        expires_at=int(now) + WINDOW_S,
        seed=secrets.randbits(_SEED_BITS),
        entered={"validating": int(now)},
    )


def batch_object(batch: BatchRecord, results_url: str) -> dict[str, Any]:
    """Return a batch's object. `results_url`: of its results once it is over."""
    counts, is_over = batch.counts, batch.is_over
    status = "ended" if is_over else "canceling" if batch.cancels else "in_progress"
    has_results = is_over and batch.output_file_id is not None
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {
            "processing": 0 if is_over else counts.total,
            "succeeded": counts.succeeded if is_over else 0,
            "errored": counts.errored if is_over else 0,
            "canceled": counts.cancelled if is_over else 0,
            "expired": counts.expired if is_over else 0,
        },
        "created_at": _rfc3339(batch.created_at),
        "expires_at": _rfc3339(batch.expires_at),
        "ended_at": _rfc3339(batch.entered[batch.status]) if is_over else None,
        "cancel_initiated_at": _rfc3339(batch.entered.get("cancelling")),
        "archived_at": None,
        "results_url": results_url if has_results else None,
    }


def _rfc3339(at: int | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
