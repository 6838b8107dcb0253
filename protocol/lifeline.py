"""Lifeline: ends a child when its parent ends, even if the parent is killed.

The supervisor keeps the write end of a pipe and passes each child the read end, with its number in
ROUNDHOUSE_LIFELINE_FD. Nothing is ever written: end of file means that the supervisor has ended. This works
on Linux and macOS alike, survives exec, and needs no kernel signal.
"""

from __future__ import annotations

import os
import signal
import threading
import time

VARIABLE = "ROUNDHOUSE_LIFELINE_FD"


def follow_parent(grace_s: float = 10.0) -> None:
    """Send this process SIGTERM when the supervisor ends; exit after `grace_s` seconds if it still runs.

    Does nothing if no supervisor passed a pipe.
    """
    if not (number := os.environ.pop(VARIABLE, "")).isdigit():
        return
    fd = int(number)
    os.set_inheritable(fd, False)
    threading.Thread(target=_follow, args=(fd, grace_s), name="lifeline", daemon=True).start()


def _follow(fd: int, grace_s: float) -> None:
    while os.read(fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(1)
