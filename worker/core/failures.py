"""Failures of the engine and starvation of rows, which end the process when nothing else helps.

The failure of a prompt counts only if the engine then fails on a probe prompt as well, so no client can end
the worker with its prompts. A failure of the GPU ends the process at once. A row that makes no progress is
restarted once (`protocol.common.progress`).
"""

from __future__ import annotations

import logging

from protocol.common.progress import Watched
from protocol.errors import Code, RequestError
from worker.core.rows import Phase, Row
from worker.interfaces import Engine
from worker.process.device_errors import raise_if_device_failed
from worker.values import GuideError, SamplingParams

log = logging.getLogger(__name__)

FAILURES_MAX = 10
"""Consecutive failures of the engine, without a token in between, after which the process ends."""
PROBE = "probe"
"""Row id of the probe prompt. A gateway's request ids are random, and never this one."""


class EngineKeepsFailing(Exception):
    """The engine failed too many times in a row; the process must be restarted."""


class Failures:
    """Counter of consecutive failures, without a token in between."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def count(self, error: Exception) -> None:
        """Count a failure of the engine. Raises `EngineKeepsFailing`, or `DeviceError` if the GPU failed."""
        raise_if_device_failed(error)
        self.in_a_row += 1
        if self.in_a_row >= FAILURES_MAX:
            raise EngineKeepsFailing(f"{self.in_a_row} failures in a row, the last {error!r}")

    def probe(self, engine: Engine) -> None:
        """Count a failed prompt if a probe prompt fails as well. Raises `EngineKeepsFailing`."""
        try:
            engine.prefill({PROBE: (0,)})
            engine.start(PROBE, (0, 0), 2, SamplingParams())
        except Exception as failure:  # the engine is at fault
            log.exception("the engine fails on a probe prompt as well")
            self.count(failure)
        finally:
            engine.drop(PROBE)


def engine_error(error: Exception) -> RequestError:
    """Return the error for a request on which the model failed, or whose grammar cannot be enforced to its
    end. Raises `DeviceError` if the GPU failed."""
    raise_if_device_failed(error)
    if isinstance(error, GuideError):
        message = f"The grammar of this request cannot be enforced to the end of its answer: {error}."
        return RequestError(Code.INVALID_REQUEST, message)
    wording = f"The model failed on this request ({type(error).__name__})."
    return RequestError(Code.ENGINE_ERROR, wording)


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
