"""Exit status of a job of launchd, which restarts it after every status but 0.

The launcher puts the id of the process that it becomes into a variable. That process exits with 0 instead of
EX_CONFIG, which no restart cures; its children have other ids, and keep their status.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from protocol.settings.reader import EXIT_CONFIGURATION

VARIABLE = "ROUNDHOUSE_LAUNCHD_PID"


def status_for_manager(status: int) -> int:
    """Return the status that this process should exit with, instead of `status`."""
    is_job = os.environ.get(VARIABLE) == str(os.getpid())
    return 0 if is_job and status == EXIT_CONFIGURATION else status


@contextmanager
def exits_for_manager() -> Iterator[None]:
    """Exit with the status for the service manager, if the block exits with a status."""
    try:
        yield
    except SystemExit as ended:
        if isinstance(ended.code, int):
            raise SystemExit(status_for_manager(ended.code)) from None
        raise
