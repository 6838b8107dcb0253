"""Time bound of template rendering: a render that takes too long is interrupted.

A chat template is a program that comes with a model: its loops and macros may run for ever. A thread cannot
be killed, but CPython can raise an exception in it between two bytecodes (`PyThreadState_SetAsyncExc`). This
ends Jinja's templates and upstream's own renderers wherever they loop, but not within one call of a C
function. A daemon thread watches all renders of the process.

Invariants: a render is interrupted at most once, and never after `within` has returned. The interruption is
no `Exception`, so that no renderer ignores it by accident.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

RENDER_S_MAX = 5.0
"""Longest time of one render. A conversation of a megabyte takes some ten milliseconds."""
_POLL_S = 0.25
_IDLE_S = 60.0

T = TypeVar("T")


class RenderTimeout(Exception):
    """A template took too long. The message is a sentence."""


class _Interruption(BaseException):
    """Raised in a thread that renders."""


@dataclass(slots=True, eq=False)
class _Render:
    until: float
    thread: int = field(default_factory=threading.get_ident)
    is_interrupted: bool = False


class _Watch:
    """Watches the renders of all threads, on a thread of its own while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._renders: set[_Render] = set()
        self._thread: threading.Thread | None = None

    def begin(self, render: _Render) -> None:
        with self._changed:
            self._renders.add(render)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="render-watch", daemon=True)
                self._thread.start()
            elif len(self._renders) == 1:
                self._changed.notify()

    def end(self, render: _Render) -> None:
        """Stop watching, on the thread that renders. Idempotent."""
        with self._changed:
            self._renders.discard(render)
        if render.is_interrupted:  # it may have come too late to be raised within the render
            _absorb(render.thread)

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for render in self._renders:
                    if render.until <= now and not render.is_interrupted:
                        render.is_interrupted = True
                        _interrupt(render.thread)
                self._changed.wait(_POLL_S if self._renders else _IDLE_S)


def _interrupt(thread: int) -> None:
    """Raise `_Interruption` in a thread at its next bytecode."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Interruption))


def _absorb(thread: int) -> None:
    """Let an interruption of this thread that has not been raised yet, or one like it, be raised here.

    CPython 3.11 can withdraw one, but then keeps the flag for it: every thread would go on looking for one
    between bytecodes, and never get past the first call where a profiler runs.
    """
    try:
        _interrupt(thread)
        while True:
            pass
    except _Interruption:
        return


_watch = _Watch()


def within(seconds: float, render: Callable[[], T]) -> T:
    """Return what `render` returns. Raises `RenderTimeout` if it takes longer than about `seconds`."""
    watched = _Render(time.monotonic() + seconds)
    try:
        try:
            _watch.begin(watched)
            return render()
        finally:
            _watch.end(watched)
    except _Interruption:
        _watch.end(watched)
        raise RenderTimeout(f"it takes longer than {seconds:g} s.") from None
