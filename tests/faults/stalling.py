"""A worker whose model thread hangs forever in the next step after SIGUSR1."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from types import FrameType

from worker.schedule.loop import Loop

VARIABLE = "STALLING_WORKER"
"""The variable with the module of the worker."""


def stall_on_signal() -> None:
    """Let the next step after SIGUSR1 hang."""
    told = threading.Event()
    step = Loop._step

    def stalling(loop: Loop) -> bool:
        if told.is_set():
            threading.Event().wait()
        return step(loop)

    def tell(_number: int, _frame: FrameType | None) -> None:
        told.set()

    signal.signal(signal.SIGUSR1, tell)
    Loop._step = stalling  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    stall_on_signal()
    raise SystemExit(importlib.import_module(os.environ[VARIABLE]).main())
