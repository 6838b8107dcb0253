"""A child that dies with its parent, also when the parent is killed outright.

The supervisor keeps the write end of a pipe and hands each child the read end, its number in
ROUNDHOUSE_LIFELINE_FD. Nothing is ever written: end-of-file means that the supervisor is gone. Works alike
on Linux and macOS, survives exec, and needs no signal from the kernel.
"""

from __future__ import annotations

import os
import signal
import threading
import time

VARIABLE = "ROUNDHOUSE_LIFELINE_FD"


def follow_parent(grace_s: float = 10.0) -> None:
    """Send this process SIGTERM when the supervisor is gone, and end it after `grace_s` if that did not.

    Does nothing when no supervisor handed a pipe over.
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
