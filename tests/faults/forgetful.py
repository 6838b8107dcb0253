"""`python -m tests.faults.forgetful …`: the scripted worker, with a scheduler that forgets requests.

It forgets requests with a limit of `FORGOTTEN_TOKENS` tokens. The variable `TESTS_FORGETS` is one of:

    once        each such row is removed from the scheduler's tables on arrival
    always      such rows are never scheduled
    unnoticed   the same, and the worker's progress watchdog is off
"""

from __future__ import annotations

import math
import os
from typing import Any

from tests.scripted_worker import __main__ as fake
from worker.core.rows import Row
from worker.core.scheduler import Scheduler
from worker.gateway import model_thread as modelthread

FORGOTTEN_TOKENS = 77


def _is_forgotten(row: Row) -> bool:
    return row.request.max_tokens == FORGOTTEN_TOKENS


class LosesRows(Scheduler):
    """A scheduler that removes some rows from its tables."""

    def add(self, *args: Any, **options: Any) -> Row:
        row = super().add(*args, **options)
        if _is_forgotten(row):
            del self._in[row.phase][row]
        return row


class NeverPlansRows(Scheduler):
    """A scheduler that never schedules some rows."""

    def _line(self, cache_bytes: int, preempted: list[Row]) -> list[Row]:
        return [row for row in super()._line(cache_bytes, preempted) if not _is_forgotten(row)]


def main() -> int:
    how = os.environ["TESTS_FORGETS"]
    vars(modelthread)["Scheduler"] = LosesRows if how == "once" else NeverPlansRows
    if how == "unnoticed":
        vars(modelthread)["starved_after_s"] = lambda stall_timeout_s: math.inf
    return fake.main()


if __name__ == "__main__":
    raise SystemExit(main())
