"""`python -m tests.eager`: a worker that speculates at a loss as well."""

from __future__ import annotations

import os
import sys

from worker.__main__ import main
from worker.core import speculation


def make_eager() -> None:
    speculation.GAIN_MIN = 0.0
    speculation.READ_PER_TOKEN = speculation.MISSED_TOKENS_MAX = 10**9


if __name__ == "__main__":
    make_eager()
    status = main()
    sys.stderr.flush()
    os._exit(status)  # as the worker does
