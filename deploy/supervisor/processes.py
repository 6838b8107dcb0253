"""Processes of children: each has a stderr pipe, a breadcrumb slot and a waiting thread; workers also have a
spawn channel (`channels`).

The waiting thread reports an exit once, after everything that the process had started has been killed too.
A process's record stays until another process gets its name. Threads identify a process by pid, because it
may have another name by then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil
from msgspec import Struct

from deploy.supervisor.channels import WorkerSpawnChannel
from deploy.supervisor.child import Child
from deploy.supervisor.events import ChildMessage, Died, NotStarted
from deploy.supervisor.memory import process_bytes
from deploy.supervisor.stderr import QuietTerminal, Stderr
from protocol import channel
from protocol.breadcrumbs import VARIABLE, BreadcrumbSlot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    waiter: threading.Thread
    line: WorkerSpawnChannel | None


class Processes:
    """Processes by their current names. `send` is called on any thread."""

    def __init__(
        self,
        send: Callable[[Died | NotStarted | ChildMessage], None],
        quiet: QuietTerminal | None = None,
    ) -> None:
        self._send = send
        self._quiet = quiet
        self._running: dict[str, _Running] = {}

    def start(self, name: str, child: Child, inherited: Mapping[str, int]) -> None:
        """Start a process, or report why it could not be started. `inherited`: its inherited descriptors, by
        the variable that holds the number."""
        try:
            with contextlib.ExitStack() as undo:
                running = self._launch(name, child, inherited, undo)
                undo.pop_all()
        except (OSError, RuntimeError) as error:  # RuntimeError: there can be no more threads
            self._send(NotStarted(name, str(error)))
            return
        log.info("%s runs as pid %d", name, running.process.pid)
        self._running[name] = running

    def _launch(
        self, name: str, child: Child, inherited: Mapping[str, int], undo: contextlib.ExitStack
    ) -> _Running:
        """Start a process and its threads. `undo` gets what ends them if a later one cannot be started.

        Raises `OSError` or `RuntimeError`.
        """
        breadcrumb = BreadcrumbSlot()
        undo.callback(breadcrumb.close)
        stderr = Stderr(name, quiet=self._quiet)
        undo.callback(stderr.close)
        inherited = {**inherited, VARIABLE: breadcrumb.fd}
        line = WorkerSpawnChannel() if child.model is not None else None
        if line is not None:
            undo.callback(line.close)
            inherited[channel.SPAWN_FD] = line.theirs.fileno()
            if child.settings is not None:
                line.send_settings(child.settings)
        process = _begin(child, inherited, stderr.writer)
        undo.callback(_end, process)
        if line is not None:
            line.theirs.close()
            line.listen(lambda word: self._send(ChildMessage(name, process.pid, word)))
        waiter = threading.Thread(
            target=self._await_end,
            args=(name, process, stderr, breadcrumb, line),
            name=f"await-{name}",
            daemon=True,
        )
        waiter.start()
        return _Running(process, waiter, line)

    def give(self, spare: str, name: str, settings: Struct | None) -> bool:
        """Send the process `spare` its `settings` and rename it to `name`. Return whether they could be
        sent."""
        given = self._running[spare]
        if given.line is None or settings is None:
            return False
        try:
            given.line.send_settings(settings)
        except OSError:
            return False
        self._running[name] = self._running.pop(spare)
        log.info("%s runs as pid %d, which was the spare", name, given.process.pid)
        return True

    def _await_end(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        stderr: Stderr,
        breadcrumb: BreadcrumbSlot,
        line: WorkerSpawnChannel | None,
    ) -> None:
        returncode = process.wait()
        # Its own children must not outlive it: a helper could hold the GPU that the next worker needs. A
        # group id is not reused while the group has members, so the reaped id is no other process's yet.
        _kill_group(process.pid)
        if line is not None:
            line.close()
        self._send(Died(name, process.pid, returncode, stderr.close(), breadcrumb.close()))

    def pid(self, name: str) -> int:
        """Return the id of the process that has this name, or had it last."""
        return self._running[name].process.pid

    def names(self) -> dict[int, str]:
        """Return the names by process id."""
        return {running.process.pid: name for name, running in self._running.items()}

    def memory_bytes(self, name: str) -> int:
        """Return its memory; 0 if it does not run."""
        return process_bytes(pid) if (pid := self._running_pid(name)) is not None else 0

    def cpu_s(self, name: str) -> float:
        """Return the CPU seconds that it has used; 0 if it does not run."""
        return process_cpu_s(pid) if (pid := self._running_pid(name)) is not None else 0.0

    def _running_pid(self, name: str) -> int | None:
        running = self._running.get(name)
        return None if running is None or running.process.returncode is not None else running.process.pid

    def terminate(self, name: str) -> None:
        self._running[name].process.terminate()

    def kill(self, name: str) -> None:
        """Kill a process and everything that it has started."""
        _kill_group(self._running[name].process.pid)

    def end_everything(self, wait_s_max: float) -> None:
        """Kill processes that a bug of ours has left running, and wait up to `wait_s_max` for each thread."""
        for running in self._running.values():
            if running.process.returncode is None:
                _kill_group(running.process.pid)
            running.waiter.join(wait_s_max)


def _begin(child: Child, inherited: Mapping[str, int], stderr: int) -> subprocess.Popen[bytes]:
    """Raises `OSError`."""
    return subprocess.Popen(
        child.argv,
        env={**child.env, **{variable: str(fd) for variable, fd in inherited.items()}},
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=list(inherited.values()),
        # Its own session: Ctrl-C in the terminal reaches only us, and we stop children in order.
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    _kill_group(process.pid)
    process.wait()


def _kill_group(leader: int) -> None:
    # The group is gone, or (macOS) contains only zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


# --- CPU time of workers, from which the supervisor concludes that they are idle ---------------------

IDLE_S = 2.0
"""Interval over which CPU time is measured."""
IDLE_SHARE_MAX = 0.05
"""Maximum share of a core of an idle worker. It uses 0.3%; one that generates on a GPU uses far more."""


class IdleWatch:
    """Idle detection from cumulative CPU time, sampled once per `IDLE_S`."""

    def __init__(self) -> None:
        self._sampled_at: float | None = None
        self._cpu_s = 0.0

    def due_in_s(self, now: float) -> float:
        """Return the seconds until the next sample is due. A sample of long ago is discarded."""
        if self._sampled_at is None or now - self._sampled_at > 2 * IDLE_S:
            self._sampled_at = None
            return 0.0
        return max(0.0, self._sampled_at + IDLE_S - now)

    def is_idle(self, cpu_s: float, now: float) -> bool:
        """Take a sample if one is due, and return whether hardly any CPU time was used since the last one.

        `cpu_s`: CPU seconds of all workers so far. It falls when one of them ends, which is no idleness.
        """
        if self.due_in_s(now) > 0:
            return False
        since, before_s = self._sampled_at, self._cpu_s
        self._sampled_at, self._cpu_s = now, cpu_s
        return since is not None and 0 <= cpu_s - before_s <= IDLE_SHARE_MAX * (now - since)


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process; 0 if it has just ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except (psutil.Error, OSError):
        return 0.0
    return float(times.user + times.system)
