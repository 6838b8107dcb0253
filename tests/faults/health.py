"""Checks during fault tests: an undisturbed client, and the health of the processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

from tests.faults.streams import Client, scripted
from tests.system import Process, chat_body

TOKENS = 100
GROWTH_BYTES_MAX = 24 * 2**20
"""Maximum growth of a process's memory after warm-up."""
LINES_PER_S_MAX = 20.0
"""Maximum rate of log lines of a process, without the lines of requests."""


class Neighbour(threading.Thread):
    """A client that requests one stream after another; each must be undisturbed."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__()
        self._url, self._model, self._over = url, model, threading.Event()
        self.streams, self.wrong = 0, ""

    def run(self) -> None:
        text = f"my own affairs !tokens={TOKENS}"
        body = chat_body(text, stream=True, model=self._model, stream_options={"include_usage": True})
        while not self._over.is_set() and not self.wrong:
            client = Client(self._url, body)
            client.run()
            try:
                assert client.texts == [scripted(text, TOKENS)]
                self.streams += 1
            except Exception as error:
                self.wrong = f"the undisturbed client: {error!r}: {client.read[-200:]!r}"

    def __enter__(self) -> Neighbour:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self.join()


class Health:
    """Health of processes: they must stay alive, not grow, log little, and log no unexpected traceback."""

    def __init__(self, processes: Sequence[Process], boundary: str | None = None) -> None:
        """`boundary`: text in the line before an expected traceback; None: none is expected."""
        self._processes = processes
        self._boundary = boundary
        self._began = time.monotonic()
        self._warm: dict[str, int] = {}

    def warm(self) -> None:
        """Record the memory of the processes, which must not grow after this."""
        self._warm = {process.name: _memory(process) for process in self._processes if process.running}

    def complaints(self) -> list[str]:
        """Return what is wrong with the processes."""
        return [complaint for process in self._processes for complaint in self._examine(process)]

    def _examine(self, process: Process) -> list[str]:
        log = process.log()
        if not process.running:
            return [f"{process.name} died: {log[-2000:]}"]
        found = []
        if process.name in self._warm:  # a short run may end before it is warm
            growth = _memory(process) - self._warm[process.name]
            if growth > GROWTH_BYTES_MAX:
                found.append(f"{process.name} grew by {growth / 2**20:.1f} MiB")
        before, *tracebacks = log.split("Traceback")
        for traceback in tracebacks:
            if self._boundary is None or self._boundary not in before.rstrip("\n").rpartition("\n")[2]:
                found.append(f"{process.name} logged an unexpected traceback: {traceback[:3000]}")
            before = traceback
        lines = sum(" tokens in " not in line for line in log.splitlines())
        if lines > 200 + LINES_PER_S_MAX * (time.monotonic() - self._began):
            found.append(f"{process.name} wrote {lines} lines: {log[-3000:]}")
        return found


def _memory(process: Process) -> int:
    return int(process.stats.memory_info().rss)
