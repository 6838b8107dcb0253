"""`python -m tests.eager`: a worker that speculates in every step, even at a loss."""

from __future__ import annotations

import os
import sys

from worker.__main__ import main
from worker.schedule import draft_catch_up, speculation


def make_eager() -> None:
    speculation.GAIN_MIN, speculation.MISSES_MAX, draft_catch_up.READ_PER_TOKEN = 0.0, 10**9, 10**9
    draft_catch_up.MISSED_TOKENS_MAX = 10**9


if __name__ == "__main__":
    make_eager()
    status = main()
    sys.stderr.flush()
    os._exit(status)  # as the worker does
