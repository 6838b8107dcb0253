"""Files and batches as objects of OpenAI's API. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker.api.batches.body import WINDOW, BatchBody
from broker.api.batches.records import WINDOW_S, BatchRecord, Counts, FileRecord
from broker.dialects.body import wrong
from protocol.errors import Code, RequestError

# --- Pagination of lists of objects by id ------------------------------------------------------------

_DIGITS_MAX = 6


@dataclass(frozen=True, slots=True)
class Paging:
    """Names and bounds of an API's parameters. `before`: None if pages only go forward."""

    after: str
    before: str | None
    limit: int
    limit_max: int

    def page(self, items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
        """Return one page of `items`, which are in the order of the list. Raises `RequestError` naming the
        parameter."""
        ids = [item["id"] for item in items]
        first, last = 0, len(items)
        limit = self._limit(query)
        if self.after in query:
            first = 1 + _place(ids, self.after, query[self.after])
        if self.before is not None and self.before in query:
            last = _place(ids, self.before, query[self.before])
            first = max(first, last - limit)
        shown = items[first:last][:limit]
        # Backwards, there is more if a page before this one has anything.
        has_more = first > 0 if self.before in query else first + len(shown) < last
        return {
            "data": list(shown),
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": has_more,
        }

    def _limit(self, query: Mapping[str, str]) -> int:
        text = query.get("limit", str(self.limit))
        is_number = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
        if not (is_number and 1 <= int(text) <= self.limit_max):
            raise wrong("limit", f"must be between 1 and {self.limit_max}")
        return int(text)


def _place(ids: Sequence[str], name: str, id: str) -> int:
    try:
        return ids.index(id)
    except ValueError:
        raise wrong(name, f"is {id[:128]!r}, which is not in this list") from None


BATCHES = Paging("after", None, 20, 100)
FILES = Paging("after", None, 10_000, 10_000)
_SEED_BITS = 63


def new_batch(body: BatchBody, owner: str, now: float) -> BatchRecord:
    """Return a new batch."""
    return BatchRecord(
        id="batch_" + secrets.token_hex(12),
        owner=owner,
        dialect="openai",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=int(now),
        expires_at=int(now) + WINDOW_S,
        seed=secrets.randbits(_SEED_BITS),
        entered={"validating": int(now)},
        metadata=body.metadata,
        output_expires_s=body.output_expires_after.seconds if body.output_expires_after else None,
    )


# --- objects -----------------------------------------------------------------------------------------


def file_object(file: FileRecord) -> dict[str, Any]:
    """Return a file's object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: BatchRecord) -> dict[str, Any]:
    """Return a batch's object."""
    statuses = "in_progress finalizing completed failed expired cancelling cancelled"
    times = {f"{status}_at": batch.entered.get(status) for status in statuses.split()}
    faults = [
        {"code": fault.code, "message": fault.message, "param": fault.param, "line": fault.line}
        for fault in batch.faults
    ]
    counts = batch.counts
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": WINDOW,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **times,
        "request_counts": {
            "total": counts.total,
            "completed": counts.succeeded,
            "failed": counts.errored + counts.expired,
        },
        "usage": _usage(counts) if batch.is_over and batch.status != "failed" else None,
        "metadata": batch.metadata,
    }


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.input_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens},
        "output_tokens": counts.output_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.input_tokens + counts.output_tokens,
    }


def list_files(files: Sequence[FileRecord], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of files. Raises `RequestError` naming an invalid parameter."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(Code.INVALID_REQUEST, "'order' must be 'asc' or 'desc'.", param="order")
    chosen = [file for file in files if query.get("purpose", file.purpose) == file.purpose]
    chosen.sort(key=lambda file: (file.created_at, file.id), reverse=order == "desc")
    return {"object": "list", **FILES.page([file_object(file) for file in chosen], query)}
