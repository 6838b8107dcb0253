"""Writes with a time limit, for descriptors whose reader may have stopped: a terminal paused with Ctrl-S, a
pager, a full pipe. A plain blocking write to these may block for ever.

Other processes share the descriptor, so it is not made non-blocking. Instead `select` is called before each
write, and a piece is small enough to be written without blocking (`PIPE_BUF`).
"""

from __future__ import annotations

import os
import select
import threading
import time

WRITE_S_MAX = 1.0
"""Default time limit of a write, in seconds."""

_lock = threading.Lock()
"""Makes `select` and the write atomic: two threads that both find the pipe writable could overfill it."""


class BoundedWriter:
    """Writer that drops data if its reader is too slow.

    A write waits at most `wait_s_max` seconds. After a timeout, writes do not wait until one succeeds again.
    """

    def __init__(self, descriptor: int, wait_s_max: float = WRITE_S_MAX) -> None:
        self._descriptor = descriptor
        self._wait_s_max = wait_s_max
        self._is_blocked = False
        self._dropped_bytes = 0

    def write(self, data: bytes) -> bool:
        """Write `data` in pieces of whole lines; return False if some was dropped. Raises `OSError`."""
        while data:
            piece = data[: _piece_end(data)]
            written = self._write_piece(piece)
            if not written:
                self._is_blocked = True
                self._dropped_bytes += len(data)
                return False
            self._is_blocked = False
            data = data[written:]
        return True

    def take_dropped(self) -> int:
        """Return and reset the number of dropped bytes; 0 while the reader is still blocked."""
        if self._is_blocked or not self._dropped_bytes:
            return 0
        dropped, self._dropped_bytes = self._dropped_bytes, 0
        return dropped

    def _write_piece(self, piece: bytes) -> int:
        """Return the number of bytes written; 0 if the reader is blocked."""
        wait_s = 0.0 if self._is_blocked else self._wait_s_max
        until = time.monotonic() + wait_s
        if not _lock.acquire(timeout=wait_s):
            return 0
        try:
            left_s = max(0.0, until - time.monotonic())
            _, writable, _ = select.select((), (self._descriptor,), (), left_s)
            return os.write(self._descriptor, piece) if writable else 0
        finally:
            _lock.release()


def _piece_end(data: bytes) -> int:
    """Return the end of the whole lines that fit into `PIPE_BUF`, which never blocks if writable."""
    if len(data) <= select.PIPE_BUF:
        return len(data)
    return data.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
