"""`python -m tests.eager`: a worker that tries drafts in every step, whether they pay or not."""

from __future__ import annotations

import math
import os
import sys

from worker.__main__ import main
from worker.schedule import choices, guessing, trust, worth
from worker.schedule.following import Following
from worker.schedule.rows import Row


def make_eager() -> None:
    choices.GAIN_MIN = choices.GAIN_KEPT = 0.0
    guessing.CREDIT_FIRST = guessing.CREDIT_MAX = worth.LOST_STEPS_MAX = 1e9
    trust.TRIED_GUESSES, trust.VAIN_STEPS = 0, 10**9
    Following.seconds = _nothing  # type: ignore[method-assign]


def _nothing(self: Following, row: Row) -> float:
    """What it takes to read a prompt."""
    return -math.inf


if __name__ == "__main__":
    make_eager()
    status = main()
    sys.stderr.flush()
    os._exit(status)  # as the worker does
