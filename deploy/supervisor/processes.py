"""The processes of children: each with a pipe for its stderr, a page of the logbook, and a thread that waits;
those of workers with a line besides (`startlines`).

A death is told when everything the process had started has been ended too, once, by that thread. What is
known of a process stays until another one bears its name. What threads tell of one goes by its id: it may
bear another name by then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deploy.supervisor.child import Child
from deploy.supervisor.events import Died, NotStarted, Said
from deploy.supervisor.memory import process_bytes
from deploy.supervisor.startlines import StartLine
from deploy.supervisor.stderr import Stderr
from protocol import logbook, startline

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    waiter: threading.Thread
    line: StartLine | None


class Processes:
    """By the names that children bear just now. `say` is called on any thread."""

    def __init__(self, say: Callable[[Died | NotStarted | Said], None]) -> None:
        self._say = say
        self._running: dict[str, _Running] = {}

    def start(self, name: str, child: Child, inherited: Mapping[str, int]) -> None:
        """`inherited`: descriptors that it gets, each under the variable that tells it the number."""
        try:
            page = logbook.Page()
        except OSError as error:
            self._say(NotStarted(name, str(error)))
            return
        stderr, line = Stderr(name), StartLine() if child.model is not None else None
        inherited = {**inherited, logbook.VARIABLE: page.fd}
        if line is not None:
            inherited[startline.VARIABLE] = line.theirs.fileno()
        try:
            process = _begin(child, inherited, stderr.writer)
        except OSError as error:
            stderr.close()
            page.close()
            if line is not None:
                line.close()
            self._say(NotStarted(name, str(error)))
            return
        log.info("%s runs as pid %d", name, process.pid)
        if line is not None:
            line.listen(lambda word: self._say(Said(name, process.pid, word)))
        waiter = threading.Thread(
            target=self._await_end,
            args=(name, process, stderr, page, line),
            name=f"await-{name}",
            daemon=True,
        )
        self._running[name] = _Running(process, waiter, line)
        waiter.start()

    def give(self, spare: str, name: str, words: Sequence[str]) -> bool:
        """Have the process that bears the one name be told these words, and bear the other one; whether it
        could be told."""
        given = self._running[spare]
        if given.line is None or not given.line.tell(words):
            return False
        self._running[name] = self._running.pop(spare)
        log.info("%s runs as pid %d, which was the spare", name, given.process.pid)
        return True

    def _await_end(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        stderr: Stderr,
        page: logbook.Page,
        line: StartLine | None,
    ) -> None:
        returncode = process.wait()
        # What it started must not outlive it: a helper could hold the GPU that the next worker needs. A
        # group id stays taken while anyone is in it, so the id just reaped does not name strangers yet.
        _kill_group(process.pid)
        if line is not None:
            line.close()
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
        _kill_group(self._running[name].process.pid)

    def leave_nothing(self, wait_s_max: float) -> None:
        """Wait so long for each thread. A process that still runs, after a mistake of ours, is killed."""
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
        # Its own session: Ctrl-C at the terminal reaches us alone, and we stop it in its turn.
        start_new_session=True,
    )


def _kill_group(leader: int) -> None:
    # Gone already, or (macOS) nothing left in the group but zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
