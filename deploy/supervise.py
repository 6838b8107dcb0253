"""Runs the children that `lifecycle` decides about: processes, signals and the lifeline, in the foreground.

The main thread owns everything but the waiting: one thread per process sits in `wait` and puts the death in
the same queue as the thread that hears of signals, so all that happens arrives at one place, one at a time.

What must always hold: when `run` returns, by whatever way, no child and nothing a child has started is left,
every descriptor opened here is closed and the signal handlers are those found. If this process is killed
outright, the write end of the lifeline closes with it and the children end themselves (`protocol.lifeline`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from deploy.lifecycle import (
    KILL_WAIT_S_MAX,
    Decision,
    Died,
    Event,
    Kill,
    Lifecycle,
    NotStarted,
    Report,
    RestartLimits,
    RestartPolicy,
    Start,
    StopAsked,
    Terminate,
)
from deploy.stderr import Stderr
from protocol import lifeline

STOP_TIMEOUT_S = 15.0
WAKE_S_MAX = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Child:
    """A process to keep running. `env` is its whole environment."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    waiter: threading.Thread


class Supervisor:
    """Keeps `children` running until told to stop, and stops them in the order given."""

    def __init__(
        self,
        children: Sequence[Child],
        *,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        limits: RestartLimits | None = None,
    ) -> None:
        self._children = {child.name: child for child in children}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._lifecycle = Lifecycle(
            [child.name for child in children],
            RestartPolicy(limits or RestartLimits()),
            stop_timeout_s=stop_timeout_s,
            now=time.monotonic(),
        )

    def run(self) -> int:
        """The exit status: 0 after a requested stop, 78 for wrong settings, 1 when deaths came too fast.

        Once, and in the main thread: it takes SIGINT, SIGTERM and SIGHUP.
        """
        with _stop_signals(self._events):
            reader, writer = os.pipe()  # close-on-exec, both: only the reader is handed over, by `pass_fds`
            try:
                return self._loop(reader)
            finally:
                self._leave_nothing()
                os.close(reader)
                os.close(writer)

    def _loop(self, reader: int) -> int:
        event: Event | None = None
        while True:
            for decision in self._lifecycle.handle(event, time.monotonic()):
                self._carry_out(decision, reader)
            if self._lifecycle.status is not None:
                return self._lifecycle.status
            event = self._next_event()

    def _next_event(self) -> Event | None:
        wake_at = self._lifecycle.wake_at()
        wait_s = WAKE_S_MAX if wake_at is None else max(0.0, wake_at - time.monotonic())
        try:
            return self._events.get(timeout=min(wait_s, WAKE_S_MAX))
        except queue.Empty:
            return None

    def _carry_out(self, decision: Decision, reader: int) -> None:
        match decision:
            case Start(name):
                self._start(self._children[name], reader)
            case Terminate(name):
                self._running[name].process.terminate()
            case Kill(name):
                _kill_group(self._running[name].process.pid)
            case Report(text, level):
                log.log(level, "%s", text)

    def _start(self, child: Child, reader: int) -> None:
        stderr = Stderr(child.name)
        try:
            process = subprocess.Popen(
                child.argv,
                env={**child.env, lifeline.VARIABLE: str(reader)},
                stdin=subprocess.DEVNULL,
                stderr=stderr.writer,
                pass_fds=[reader],
                # Its own session: Ctrl-C at the terminal reaches us alone, and we stop it in its turn.
                start_new_session=True,
            )
        except OSError as error:
            stderr.close()
            self._events.put(NotStarted(child.name, str(error)))
            return
        log.info("%s runs as pid %d", child.name, process.pid)
        waiter = threading.Thread(
            target=self._await_end,
            args=(child.name, process, stderr),
            name=f"await-{child.name}",
            daemon=True,
        )
        self._running[child.name] = _Running(process, waiter)
        waiter.start()

    def _await_end(self, name: str, process: subprocess.Popen[bytes], stderr: Stderr) -> None:
        returncode = process.wait()
        # What it started must not outlive it: a helper could hold the GPU that the next worker needs. A
        # group id stays taken while anyone is in it, so the id just reaped does not name strangers yet.
        _kill_group(process.pid)
        self._events.put(Died(name, process.pid, returncode, stderr.close()))

    def _leave_nothing(self) -> None:
        for running in self._running.values():
            if running.process.returncode is None:  # only after a mistake of ours
                _kill_group(running.process.pid)
            running.waiter.join(KILL_WAIT_S_MAX)


def _kill_group(leader: int) -> None:
    # Gone already, or (macOS) nothing left in the group but zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


@contextlib.contextmanager
def _stop_signals(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Signals that ask for a stop become events.

    A Python handler runs when the main thread gets to it. A signal that comes just before that thread blocks,
    or that the kernel gives to another thread, would lie there until the wait is over. The wakeup descriptor
    is written at once, wherever the signal lands, so a thread reads that instead.
    """
    numbers = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: meant to outlive its terminal
        numbers.add(signal.SIGHUP)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    listener = threading.Thread(target=_listen, args=(reader, events), name="signals", daemon=True)
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
        listener.join(KILL_WAIT_S_MAX)
        os.close(reader)


def _listen(reader: int, events: queue.SimpleQueue[Event]) -> None:
    while number := os.read(reader, 1):
        events.put(StopAsked(signal.Signals(number[0]).name))


def _noted_elsewhere(_number: int, _frame: FrameType | None) -> None:
    """Only a signal with a handler reaches the wakeup descriptor."""
