"""Signals that ask the supervisor to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from deploy.supervisor.events import StopAsked

_LISTENER_END_S_MAX = 5.0


@contextlib.contextmanager
def stop_signals(send: Callable[[StopAsked], None]) -> Iterator[None]:
    """Turn stop signals into events. Must be entered in the main thread.

    A Python handler runs only when the main thread is free. A signal that arrives just before that thread
    blocks, or that the kernel delivers to another thread, would stay unhandled until the wait is over. The
    wakeup descriptor is written at once, whichever thread gets the signal, so a thread reads that instead.
    """
    numbers = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup: outlive the terminal
        numbers.add(signal.SIGHUP)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    listener = threading.Thread(target=_listen, args=(reader, send), name="signals", daemon=True)
    listener.start()
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _noted_elsewhere) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(writer)
        listener.join(_LISTENER_END_S_MAX)
        os.close(reader)


def _listen(reader: int, send: Callable[[StopAsked], None]) -> None:
    while number := os.read(reader, 1):
        send(StopAsked(signal.Signals(number[0]).name))


def _noted_elsewhere(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: only a signal with a handler reaches the wakeup descriptor."""
