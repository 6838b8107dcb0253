"""Spare: a worker process without a model or incarnation that has imported everything any model needs. It
receives its command line over `protocol.channel`.

It starts while other workers are busy, so it imports on a low-priority thread, which then ends: a process may
not raise its own priority again. Threads started by that thread keep its low priority, so it must not start
threads that live on. At the lowest priority of all it might never get ready on a machine that is busy.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from protocol import channel, lifeline
from worker import command_buffers, file_limit
from worker.preload import preload_openblas

_LOWER = 10
_DARWIN_THREAD, _DARWIN_BACKGROUND = 3, 0x1000
"""Arguments of macOS's setpriority(2) for a thread; the usual ones set a whole process's priority."""


def words(imports: Sequence[str], look_ahead: Callable[[], None] = lambda: None) -> list[str]:
    """Return the arguments of the command line, or for a spare those that its supervisor sends when it is
    needed. Before, a spare imports `imports` at low priority and calls `look_ahead` at normal priority.

    Exits if the supervisor ends before.
    """
    if channel.SPARE not in os.environ:
        return sys.argv[1:]
    preload_openblas(sys.argv)  # may re-execute this process, so the environment must not be changed before
    del os.environ[channel.SPARE]
    command_buffers.raise_limits(os.environ)
    lifeline.follow_parent()
    line = channel.SpawnChannel.find(os.environ)
    if line is None:
        raise SystemExit(f"{channel.SPARE} is set, but there is no spawn channel from a supervisor")
    with ThreadPoolExecutor(1, initializer=_step_back) as aside:
        aside.submit(file_limit.import_upstream).result()
        aside.submit(_import, imports).result()
    look_ahead()
    line.send("there")
    try:
        told = line.read_assignment()
    except (EOFError, OSError):
        raise SystemExit(0) from None
    line.send("taken")
    line.hand_on(os.environ)
    return told


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _step_back() -> None:
    """Set the priority of this thread alone lower."""
    if sys.platform == "darwin":
        os.setpriority(_DARWIN_THREAD, 0, _DARWIN_BACKGROUND)
    else:
        os.setpriority(os.PRIO_PROCESS, 0, _LOWER)
