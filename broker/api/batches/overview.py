"""Overview of all batches for operators: numbers, progress and what they wait for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from broker.api.batches.records import BatchRecord

SHOWN_MAX = 16
"""Maximum number of unfinished batches that are listed, the oldest first."""


def overview(
    batches: Sequence[BatchRecord],
    *,
    in_flight: int,
    used: int,
    bytes_max: int,
    problem: str,
) -> dict[str, Any]:
    """Return the part of the status document.

    `in_flight`: lines that were sent. `used`: bytes on disk. `problem`: why batches wait, if they do.
    """
    unfinished = sorted((b for b in batches if not b.is_over), key=lambda b: (b.created_at, b.id))
    return {
        "statuses": dict(Counter(batch.status for batch in batches)),
        "requests": {
            "total": sum(batch.counts.total for batch in unfinished),
            "succeeded": sum(batch.counts.succeeded for batch in unfinished),
            "errored": sum(batch.counts.errored for batch in unfinished),
            "in_flight": in_flight,
        },
        "bytes": used,
        "bytes_max": bytes_max,
        "problem": problem,
        "unfinished": [
            {
                "id": batch.id,
                "status": batch.status,
                "endpoint": batch.endpoint,
                "model": batch.model,
                "total": batch.counts.total,
                "succeeded": batch.counts.succeeded,
                "errored": batch.counts.errored,
                "created_at": batch.created_at,
                "expires_at": batch.expires_at,
            }
            for batch in unfinished[:SHOWN_MAX]
        ],
    }
