"""The processes of children: each with a pipe for its stderr, a page of the logbook, and a thread that waits.

A death is told when everything the process had started has been ended too, once, by that thread. What is
known of a process stays until another one bears its name.
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

from deploy.supervisor.child import Child
from deploy.supervisor.events import Died, NotStarted
from deploy.supervisor.memory import process_bytes
from deploy.supervisor.stderr import Stderr
from protocol import logbook

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    waiter: threading.Thread


class Processes:
    """By the names that children bear just now. `say` is called on any thread."""

    def __init__(self, say: Callable[[Died | NotStarted], None]) -> None:
        self._say = say
        self._running: dict[str, _Running] = {}

    def start(self, name: str, child: Child, inherited: Mapping[str, int]) -> None:
        """`inherited`: descriptors that it gets, each under the variable that tells it the number."""
        try:
            page = logbook.Page()
        except OSError as error:
            self._say(NotStarted(name, str(error)))
            return
        stderr = Stderr(name)
        inherited = {**inherited, logbook.VARIABLE: page.fd}
        try:
            process = subprocess.Popen(
                child.argv,
                env={**child.env, **{variable: str(fd) for variable, fd in inherited.items()}},
                stdin=subprocess.DEVNULL,
                stderr=stderr.writer,
                pass_fds=list(inherited.values()),
                # Its own session: Ctrl-C at the terminal reaches us alone, and we stop it in its turn.
                start_new_session=True,
            )
        except OSError as error:
            stderr.close()
            page.close()
            self._say(NotStarted(name, str(error)))
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
        self._say(Died(name, process.pid, returncode, stderr.close(), page.close()))

    def pid(self, name: str) -> int:
        """Of the process that bears this name, or bore it last."""
        return self._running[name].process.pid

    def names(self) -> dict[int, str]:
        """By process id."""
        return {running.process.pid: name for name, running in self._running.items()}

    def memory_bytes(self, name: str) -> int:
        """What it holds of the machine's memory: nothing when it does not run."""
        running = self._running.get(name)
        if running is None or running.process.returncode is not None:
            return 0
        return process_bytes(running.process.pid)

    def terminate(self, name: str) -> None:
        self._running[name].process.terminate()

    def kill(self, name: str) -> None:
        """With all that it has started."""
        _kill_group(self.pid(name))

    def leave_nothing(self, wait_s_max: float) -> None:
        """Wait so long for each thread. A process that still runs, after a mistake of ours, is killed."""
        for running in self._running.values():
            if running.process.returncode is None:
                _kill_group(running.process.pid)
            running.waiter.join(wait_s_max)


def _kill_group(leader: int) -> None:
    # Gone already, or (macOS) nothing left in the group but zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
