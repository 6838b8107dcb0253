"""`python -m tests.eager`: a worker that speculates in every step, even at a loss."""

from __future__ import annotations

import math
import os
import sys

from worker.__main__ import main
from worker.schedule import circuit_breaker, draft_length
from worker.schedule.draft_proposals import DraftCatchUp
from worker.schedule.rows import Row


def make_eager() -> None:
    draft_length.GAIN_MIN = draft_length.GAIN_KEPT = 0.0
    circuit_breaker.CREDIT_FIRST = circuit_breaker.CREDIT_MAX = circuit_breaker.LOST_STEPS_MAX = 1e9
    circuit_breaker.TRIED_GUESSES, circuit_breaker.VAIN_STEPS = 0, 10**9
    DraftCatchUp.seconds = _nothing  # type: ignore[method-assign]


def _nothing(self: DraftCatchUp, row: Row) -> float:
    """Return a cost of prefilling the draft model that is never too high."""
    return -math.inf


if __name__ == "__main__":
    make_eager()
    status = main()
    sys.stderr.flush()
    os._exit(status)  # as the worker does
