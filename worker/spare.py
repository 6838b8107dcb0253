"""A worker's process that waits to be told what it is: it has imported all that any model needs, holds none,
and has no incarnation. `protocol.startline` says how it is told.

It is made while others work, so it imports on a thread of low priority, which ends with that:
no process may raise its own priority again. Threads that are started by such a one stay low, so nothing is
called there that starts threads for later.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from protocol import lifeline, startline
from worker.preload import preload_openblas

_LOWEST = 19
_DARWIN_THREAD, _DARWIN_BACKGROUND = 3, 0x1000
"""setpriority(2) of macOS, where the usual kind is about whole processes."""


def words(imports: Sequence[str], look_ahead: Callable[[], None] = lambda: None) -> list[str]:
    """What this process is told by its command line or, where it is a spare, by its supervisor, when it is
    needed. A spare imports the modules `imports` meanwhile; `look_ahead` is called then, at its own priority.

    Ends the process when the supervisor has gone before.
    """
    if startline.SPARE not in os.environ:
        return sys.argv[1:]
    preload_openblas(sys.argv)  # may begin this process anew: so the environment is left as it is until then
    del os.environ[startline.SPARE]
    lifeline.follow_parent()
    line = startline.Starting.find(os.environ)
    if line is None:
        raise SystemExit("a spare without a supervisor")
    with ThreadPoolExecutor(1, initializer=_step_back) as aside:
        aside.submit(_import, imports).result()
    look_ahead()
    line.say("there")
    try:
        told = line.await_words()
    except (EOFError, OSError):
        raise SystemExit(0) from None
    line.say("taken")
    line.hand_on(os.environ)
    return told


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _step_back() -> None:
    """To the lowest priority, this thread alone."""
    if sys.platform == "darwin":
        os.setpriority(_DARWIN_THREAD, 0, _DARWIN_BACKGROUND)
    else:
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
