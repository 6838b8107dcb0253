"""Watchdog of the event loop: a thread that ends the process when the loop hangs.

All clients and workers depend on one loop. If it hangs, in a library or in a file system, nothing else
notices: connections stay open and the process lives. The service manager or supervisor restarts the process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

POLL_S = 5.0
POLLS_MAX = 12
"""Consecutive checks without a beat before the process is ended. Checks are counted, not seconds: a process
that was stopped, or whose machine slept, has not hung."""
EXIT_BROKEN = 70
"""EX_SOFTWARE of sysexits: the process must be restarted."""
_CLOSE_S_MAX = 1.0


def _end_process(why: str) -> None:
    log.critical("%s", why)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(EXIT_BROKEN)


class LoopWatchdog:
    """Watchdog of one event loop, which calls `beat` regularly."""

    def __init__(self, end: Callable[[str], None] = _end_process, look_s: float = POLL_S) -> None:
        """`end`: called once with a reason, on the watchdog's thread."""
        self._end = end
        self._poll_s = look_s
        self._beats = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat(self) -> None:
        """Record that the loop is alive; called on the loop, several times between two checks."""
        self._beats += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join(_CLOSE_S_MAX)

    def _run(self) -> None:
        seen, missed = self._beats, 0
        while not self._over.wait(self._poll_s):
            missed = missed + 1 if self._beats == seen else 0
            seen = self._beats
            if missed >= POLLS_MAX:
                self._end(f"the event loop has not run for {missed * self._poll_s:g} s")
                return
