"""Keeps the machine awake: a program of the system's that runs for as long as it is to stay so."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Sequence

log = logging.getLogger(__name__)

END_WAIT_S_MAX = 2.0
_INHIBIT = ("--what=sleep:idle", "--who=roundhouse", "--why=requests run", "--mode=block")


def program(platform: str, pid: int) -> Sequence[str] | None:
    """The command; None: this system has none. It ends with the process `pid`, whatever becomes of us."""
    if platform == "darwin":
        found = shutil.which("caffeinate")
        return [found, "-i", "-w", str(pid)] if found else None
    found, tail = shutil.which("systemd-inhibit"), shutil.which("tail")
    # `tail --pid` is what waits for another process's end.
    return [found, *_INHIBIT, tail, f"--pid={pid}", "-f", os.devnull] if found and tail else None


class Caffeine:
    """One process of it at the most."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: subprocess.Popen[bytes] | None = None
        self._failed = False

    def keep(self, awake: bool) -> None:
        """From now on, and without waiting. A program that does not run is complained about once, and not
        started again."""
        if self._ending is not None and self._ending.poll() is not None:
            self._ending = None
        if self._process is not None and self._process.poll() is not None:
            log.warning("the machine cannot be kept awake: %s ends at once", self._command[0])
            self._process, self._failed = None, True
        if awake and self._process is None and self._ending is None and not self._failed:
            self._start()
        elif not awake and self._process is not None:
            self._process.terminate()
            self._process, self._ending = None, self._process

    def close(self) -> None:
        """It may sleep, and nothing of it is left."""
        self.keep(False)
        if self._ending is not None:
            try:
                self._ending.wait(END_WAIT_S_MAX)
            except subprocess.TimeoutExpired:
                self._ending.kill()
                self._ending.wait()
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
