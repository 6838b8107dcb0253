"""Spare: a worker process without a model or incarnation that has imported everything any model needs. It
receives its settings over `protocol.channel`, as every worker of `serve` does, but only when it is needed.

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
from worker.process import environment
from worker.process.preload import preload_openblas

_LOWER = 10
_DARWIN_THREAD, _DARWIN_BACKGROUND = 3, 0x1000
"""Arguments of macOS's setpriority(2) for a thread; the usual ones set a whole process's priority."""


def settings_document(imports: Sequence[str], look_ahead: Callable[[], None] = lambda: None) -> bytes | None:
    """Wait for the settings that the supervisor sends; None: this process has to read them itself. Before, a
    spare imports `imports` at low priority and calls `look_ahead` at normal priority.

    Exits if the supervisor ends before.
    """
    is_spare = channel.SPARE in os.environ
    if channel.SPAWN_FD not in os.environ or (sys.argv[1:] and not is_spare):
        return None
    preload_openblas(sys.argv)  # may re-execute this process, so the environment must not be changed before
    line = channel.SpawnChannel.find(os.environ)
    if line is None:
        raise SystemExit(f"{channel.SPAWN_FD} is no descriptor of a supervisor")
    if is_spare:
        _prepare(imports, look_ahead)
        line.send("there")
    try:
        document = line.read_settings()
    except (EOFError, OSError):
        raise SystemExit(0) from None
    if is_spare:
        line.send("taken")
    line.hand_on(os.environ)
    return document


def _prepare(imports: Sequence[str], look_ahead: Callable[[], None]) -> None:
    del os.environ[channel.SPARE]
    environment.raise_buffer_limits(os.environ)
    lifeline.follow_parent()
    with ThreadPoolExecutor(1, initializer=_step_back) as aside:
        aside.submit(environment.import_upstream).result()
        aside.submit(_import, imports).result()
    look_ahead()


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _step_back() -> None:
    """Set the priority of this thread alone lower."""
    if sys.platform == "darwin":
        os.setpriority(_DARWIN_THREAD, 0, _DARWIN_BACKGROUND)
    else:
        os.setpriority(os.PRIO_PROCESS, 0, _LOWER)
