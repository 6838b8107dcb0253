"""Process under test, observed through its output and that of its children."""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 60.0


class ProcessOutput:
    """Started process with the lines that it and its children write. Waits for lines have a deadline."""

    def __init__(self, argv: Sequence[str], cwd: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=env
        )
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_line(self, *parts: str) -> str:
        """Wait for the next line that contains all `parts`."""
        until = time.monotonic() + DEADLINE_S
        while True:
            line = self._next(until)
            assert line is not None, f"ended without {parts}: {self.lines}"
            if all(part in line for part in parts):
                return line

    def wait_silence(self) -> None:
        """Wait until this process and all that inherited its stdout have ended."""
        until = time.monotonic() + DEADLINE_S
        while self._next(until) is not None:
            pass

    def _next(self, until: float) -> str | None:
        try:
            line = self._queue.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            pytest.fail(f"no further line in time, after {self.lines}")
        if line is not None:
            self.lines.append(line)
        return line

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        status = self.process.wait(DEADLINE_S)
        self.wait_silence()
        return status

    def index(self, *parts: str) -> int:
        """Return the index of the first line with all `parts`."""
        return next(i for i, line in enumerate(self.lines) if all(part in line for part in parts))

    def end(self) -> None:
        family = []
        if self.process.poll() is None:
            own = psutil.Process(self.process.pid)
            family = [*own.children(recursive=True), own]
        for process in family:
            process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        # Checked first: closing a file that another thread still reads would block.
        assert not self._reader.is_alive(), "a process still holds the stdout of the supervisor"
        assert self.process.stdout is not None
        self.process.stdout.close()


Begin = Callable[..., ProcessOutput]
Supervise = Callable[..., ProcessOutput]
