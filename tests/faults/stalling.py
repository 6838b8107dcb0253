"""A worker whose model thread hangs for good in its next step once SIGUSR1 has come."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from types import FrameType

from worker.schedule.loop import Loop

VARIABLE = "STALLING_WORKER"
"""Names the module of the worker."""


def stall_on_signal() -> None:
    """From the next step on."""
    told = threading.Event()
    step = Loop._step

    def stalling(loop: Loop) -> None:
        if told.is_set():
            threading.Event().wait()
        step(loop)

    def tell(_number: int, _frame: FrameType | None) -> None:
        told.set()

    signal.signal(signal.SIGUSR1, tell)
    Loop._step = stalling  # type: ignore[method-assign]


if __name__ == "__main__":
    stall_on_signal()
    raise SystemExit(importlib.import_module(os.environ[VARIABLE]).main())
