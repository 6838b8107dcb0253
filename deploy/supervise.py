"""Runs the children that `lifecycle` decides about: processes, signals and the lifeline, in the foreground.

The main thread owns everything but the waiting: one thread per process sits in `wait` and puts the death in
the same queue as the thread that hears of signals, so all that happens arrives at one place, one at a time.

A reload is asked for on the control socket (`control`); the gateway says who serves (`protocol.readiness`).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil  # type: ignore[import-untyped]

from deploy.control import Control
from deploy.lifecycle import (
    KILL_WAIT_S_MAX,
    Decision,
    Died,
    Event,
    Kill,
    Lifecycle,
    NotStarted,
    ReloadAsked,
    Reloaded,
    Report,
    Serving,
    Start,
    StopAsked,
    Terminate,
    other_name,
)
from deploy.restarts import RestartLimits, RestartPolicy
from deploy.stderr import Stderr
from protocol import lifeline, logbook, readiness

STOP_TIMEOUT_S = 15.0
WAKE_S_MAX = 60.0
MARGIN_BYTES = 2**29
"""What must stay free when a second worker of the first one's size has been loaded."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Child:
    """A process to keep running. `env` is its whole environment. `hears`: it knows which workers serve."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    hears: bool = False


@dataclass(frozen=True, slots=True)
class Reloading:
    """Which child can be reloaded, by orders that come to the socket at `path`.

    `drain_timeout_s`: what it needs to end its requests. `fits`: whether another process of the size of this
    one, by its id, finds room beside it.
    """

    name: str
    path: Path
    drain_timeout_s: float
    ready_timeout_s: float
    fits: Callable[[int], bool]


def fits_beside(pid: int) -> bool:
    """Whether the machine has as much memory left as this process has taken, and a margin."""
    try:
        taken = int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has just ended
        return True
    return int(psutil.virtual_memory().available) >= taken + MARGIN_BYTES


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    waiter: threading.Thread


@dataclass(frozen=True, slots=True)
class _Pipes:
    """Descriptors that children inherit: the read end of the lifeline, the write end of readiness."""

    lifeline: int
    readiness: int


@dataclass(frozen=True, slots=True)
class _Order:
    """Somebody at the control socket wants a reload."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """The gateway says that the worker with this process id serves."""

    pid: int


_Events = queue.SimpleQueue[Event | _Order | _Ready]


class Supervisor:
    """Keeps `children` running until told to stop, and stops them in the order given."""

    def __init__(
        self,
        children: Sequence[Child],
        *,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        limits: RestartLimits | None = None,
        reloading: Reloading | None = None,
    ) -> None:
        self._children = {name: child for child in children for name in (child.name, other_name(child.name))}
        self._events: _Events = queue.SimpleQueue()
        self._reloading = reloading
        self._control: Control | None = None
        self._running: dict[str, _Running] = {}
        self._lifecycle = Lifecycle(
            [child.name for child in children],
            RestartPolicy(limits or RestartLimits()),
            stop_timeout_s=stop_timeout_s,
            now=time.monotonic(),
            drain_timeout_s=reloading.drain_timeout_s if reloading else 0.0,
            ready_timeout_s=reloading.ready_timeout_s if reloading else 0.0,
        )

    def run(self) -> int:
        """The exit status: 0 after a requested stop, 78 for wrong settings, 1 when deaths came too fast.

        Once, and in the main thread: it takes SIGINT, SIGTERM and SIGHUP.
        """
        with _stop_signals(self._events), _who_serves(self._events) as teller, self._control_open():
            reader, writer = os.pipe()  # close-on-exec, both: only the reader is handed over, by `pass_fds`
            try:
                return self._loop(_Pipes(reader, teller))
            finally:
                self._leave_nothing()
                os.close(reader)
                os.close(writer)

    @contextlib.contextmanager
    def _control_open(self) -> Iterator[None]:
        if self._reloading is None:
            yield
            return
        try:
            self._control = Control(self._reloading.path, lambda: self._events.put(_Order()))
        except OSError as error:
            log.warning("nothing can be reloaded: %s", error)
        try:
            yield
        finally:
            if self._control is not None:
                self._control.close()

    def _loop(self, pipes: _Pipes) -> int:
        event: Event | None = None
        while True:
            for decision in self._lifecycle.handle(event, time.monotonic()):
                self._carry_out(decision, pipes)
            if self._lifecycle.status is not None:
                return self._lifecycle.status
            event = self._understood(self._next_event())

    def _understood(self, event: Event | _Order | _Ready | None) -> Event | None:
        """With the names of children in place of process ids. None: it is of no concern any more."""
        match event:
            case _Order() if self._reloading is not None:
                name = self._reloading.name
                if name not in self._lifecycle.states():
                    name = other_name(name)
                running = self._running.get(name)
                return ReloadAsked(name, running is None or self._reloading.fits(running.process.pid))
            case _Ready(pid):
                names = [name for name, running in self._running.items() if running.process.pid == pid]
                return Serving(names[0]) if names else None
            case Died(name, pid) if self._running[name].process.pid != pid:
                return None  # left behind after SIGKILL, and dead at last: another one bears its name
            case _Order():
                return None
            case _:
                return event

    def _next_event(self) -> Event | _Order | _Ready | None:
        wake_at = self._lifecycle.wake_at()
        wait_s = WAKE_S_MAX if wake_at is None else max(0.0, wake_at - time.monotonic())
        try:
            return self._events.get(timeout=min(wait_s, WAKE_S_MAX))
        except queue.Empty:
            return None

    def _carry_out(self, decision: Decision, pipes: _Pipes) -> None:
        match decision:
            case Start(name):
                self._start(name, self._children[name], pipes)
            case Reloaded(done, text):
                if self._control is not None:
                    self._control.answer(done, text)
            case Terminate(name):
                self._running[name].process.terminate()
            case Kill(name):
                _kill_group(self._running[name].process.pid)
            case Report(text, level):
                log.log(level, "%s", text)

    def _start(self, name: str, child: Child, pipes: _Pipes) -> None:
        try:
            page = logbook.Page()
        except OSError as error:
            self._events.put(NotStarted(name, str(error)))
            return
        stderr = Stderr(name)
        hearing = {readiness.VARIABLE: str(pipes.readiness)} if child.hears else {}
        try:
            process = subprocess.Popen(
                child.argv,
                env={
                    **child.env,
                    lifeline.VARIABLE: str(pipes.lifeline),
                    logbook.VARIABLE: str(page.fd),
                    **hearing,
                },
                stdin=subprocess.DEVNULL,
                stderr=stderr.writer,
                pass_fds=[pipes.lifeline, page.fd, *([pipes.readiness] if child.hears else [])],
                # Its own session: Ctrl-C at the terminal reaches us alone, and we stop it in its turn.
                start_new_session=True,
            )
        except OSError as error:
            stderr.close()
            page.close()
            self._events.put(NotStarted(name, str(error)))
            return
        log.info("%s runs as pid %d", name, process.pid)
        waiter = threading.Thread(
            target=self._await_end,
            args=(name, process, stderr, page),
            name=f"await-{name}",
            daemon=True,
        )
        self._running[name] = _Running(process, waiter)
        waiter.start()

    def _await_end(
        self, name: str, process: subprocess.Popen[bytes], stderr: Stderr, page: logbook.Page
    ) -> None:
        returncode = process.wait()
        # What it started must not outlive it: a helper could hold the GPU that the next worker needs. A
        # group id stays taken while anyone is in it, so the id just reaped does not name strangers yet.
        _kill_group(process.pid)
        self._events.put(Died(name, process.pid, returncode, stderr.close(), page.close()))

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
def _stop_signals(events: _Events) -> Iterator[None]:
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


def _listen(reader: int, events: _Events) -> None:
    while number := os.read(reader, 1):
        events.put(StopAsked(signal.Signals(number[0]).name))


@contextlib.contextmanager
def _who_serves(events: _Events) -> Iterator[int]:
    """The write end of the pipe in which the gateway names workers that are ready; they become events."""
    reader, writer = os.pipe()
    listener = threading.Thread(target=_hear, args=(reader, events), name="readiness", daemon=True)
    listener.start()
    try:
        yield writer
    finally:
        os.close(writer)
        listener.join(KILL_WAIT_S_MAX)


def _hear(reader: int, events: _Events) -> None:
    with os.fdopen(reader, "rb") as lines:
        for line in lines:
            if line.strip().isdigit():
                events.put(_Ready(int(line)))


def _noted_elsewhere(_number: int, _frame: FrameType | None) -> None:
    """Only a signal with a handler reaches the wakeup descriptor."""
