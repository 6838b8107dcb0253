"""Starvation of rows: input and time limits of the progress watchdog (`protocol.common.progress`). Pure."""

from __future__ import annotations

from protocol.common.progress import Watched
from worker.core.rows import Phase, Row

STARVED_S_MAX = 30.0
"""Seconds without progress after which a row is restarted without what it waited for. After the same time
once more the worker exits, so that its requests are resent to the next one."""
STARVED_SHARE = 0.25
"""Upper bound of the same, as a share of the stall timeout."""


class RowStarved(Exception):
    """A row made no progress although it was restarted; the process must be restarted."""


def starved_after_s(stall_timeout_s: float | None) -> float:
    """Return the limit in seconds for a worker with this stall timeout; None: the default."""
    return min(STARVED_S_MAX, STARVED_SHARE * (stall_timeout_s or STARVED_S_MAX / STARVED_SHARE))


def watched(row: Row) -> Watched:
    """Return the row's state for the watchdog. Chunks, tokens, images, disk reads and scoring change it."""
    state = (
        row.phase,
        row.prefilled,
        len(row.answered),
        row.scored,
        row.images_counted_upto,
        len(row.encoded_for_row),
        row.is_blocked,
        len(row.awaited),
        row.scoring_passes,
        row.waits_for,
    )
    return Watched(
        row.id,
        row.queue_key,
        state,
        has_place=row.phase in (Phase.PREFILL, Phase.DECODE),
        is_decoding=row.phase is Phase.DECODE,
        waits_for=row.waits_for,
    )


def describe(row: Row) -> str:
    """Describe the row's progress and everything that it may wait for, for the log."""
    waits = [
        f"for {len(row.awaited)} prefix blocks from disk" * bool(row.awaited),
        f"for the prefix of {row.waits_for}" * bool(row.waits_for),
        "for importance scoring" * (row.is_blocked and not row.awaited),
    ]
    return (
        f"{row.phase}, {row.prefilled} of {len(row.tokens)} tokens prefilled, {len(row.answered)} answered, "
        f"waits {' and '.join(filter(None, waits)) or 'for nothing known'}"
    )
