"""Sleep inhibition by a system program (caffeinate, systemd-inhibit) while requests run, and its policy."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence

log = logging.getLogger(__name__)

HOLD_S = 60.0
"""Time for which the machine stays awake after the last request, for the user's next question."""
END_WAIT_S_MAX = 2.0
KILL_WAIT_S_MAX = 1.0
_INHIBIT = ("--what=sleep:idle", "--who=roundhouse", "--why=requests run", "--mode=block")


def program(platform: str, pid: int) -> Sequence[str] | None:
    """Return the command, which ends with the process `pid`; None if this system has none."""
    if platform == "darwin":
        found = shutil.which("caffeinate")
        return [found, "-i", "-w", str(pid)] if found else None
    found, tail = shutil.which("systemd-inhibit"), shutil.which("tail")
    # `tail --pid` waits for the end of another process.
    return [found, *_INHIBIT, tail, f"--pid={pid}", "-f", os.devnull] if found and tail else None


class KeepAwake:
    """Keep-awake policy, to be polled. Pure."""

    def __init__(self) -> None:
        self._busy_at: float | None = None

    def is_wanted(self, busy: bool, now: float) -> bool:
        """Return whether the machine should stay awake. `busy`: whether there are requests."""
        if busy:
            self._busy_at = now
        return self._busy_at is not None and now - self._busy_at < HOLD_S


class SleepInhibitor:
    """Sleep inhibitor with at most one process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: subprocess.Popen[bytes] | None = None
        self._failed = False

    def keep(self, awake: bool) -> None:
        """Start or stop the program without waiting. If it fails, log that once and do not start it again."""
        if self._ending is not None and self._ending.poll() is not None:
            self._ending = None
        if self._process is not None and self._process.poll() is not None:
            log.warning("the machine cannot be kept awake: %s exited at once", self._command[0])
            self._process, self._failed = None, True
        if awake and self._process is None and self._ending is None and not self._failed:
            self._start()
        elif not awake and self._process is not None:
            self._process.terminate()
            self._process, self._ending = None, self._process

    def close(self) -> None:
        """Allow sleep, and wait for the program to exit."""
        self.keep(False)
        if self._ending is not None:
            try:
                self._ending.wait(END_WAIT_S_MAX)
            except subprocess.TimeoutExpired:
                self._ending.kill()
                # A process that survives SIGKILL hangs in the kernel; waiting would block the shutdown.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._ending.wait(KILL_WAIT_S_MAX)
            self._ending = None

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                close_fds=True,
            )
        except OSError as error:
            self._failed = True
            log.warning("the machine cannot be kept awake: %s", error)
