"""Logging to stderr, as readable text or one JSON object a line. No prompt text, unless it is asked for.

A line about a request names it in its text and, through `log_context`, in the field `id`. The `id` is the
same in all processes. The client's `x-request-id` is `request_id` in the gateway's HTTP lines.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, TextIO

from protocol.common.log_context import fields_of

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]


log = logging.getLogger(__name__)

LINES_MAX = 20
PERIOD_S = 10.0
WORDINGS_MAX = 1024


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        request = f" [{id}]" if (id := fields_of(record).get("request_id")) else ""
        traceback = _traceback(self, record, chr(10))
        return f"{clock} {self._process:<8} {level}{record.getMessage()}{request}{traceback}"


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in fields_of(record).items() if name not in line}
        if traceback := _traceback(self, record, ""):
            line["traceback"] = traceback
        # json's ASCII output, not msgspec: a file name that is not valid Unicode must not lose the line.
        return json.dumps(line)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord, lead: str) -> str:
    return lead + formatter.formatException(record.exc_info) if record.exc_info else ""


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Log handler with a `BoundedWriter`: a paused terminal must not block the event loop, the supervisor or
    a decode step. Dropped bytes are counted."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        try:
            self._writer: BoundedWriter | None = BoundedWriter(stream.fileno())
        except (OSError, ValueError):  # the stream has no file descriptor
            self._writer = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, or drop it."""
        if self._writer is None:
            super().emit(record)
            return
        try:
            line = f"{self.format(record)}{self.terminator}".encode(errors="backslashreplace")
            if self._writer.write(line) and (dropped := self._writer.take_dropped()):
                log.warning("%d bytes of log lines were dropped: stderr was blocked", dropped)
        except Exception:  # as in the library's own handlers: logging must never raise
            self.handleError(record)


class RateLimitFilter(logging.Filter):
    """Rate limit: at most `LINES_MAX` lines with the same format string per `PERIOD_S` seconds and logger.

    The first line of the next period says how many were suppressed. Faulty peers and clients can cause ten
    thousand warnings a second. Lines below `level` always pass, except those of the loggers `named` and their
    children. The counts are not locked: two threads that log the same line at once may count as one.
    """

    def __init__(
        self,
        level: int = logging.NOTSET,
        named: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._level, self._clock = level, clock
        self._families = tuple(f"{name}." for name in named)
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}
        """Start of the period and number of lines, by logger and format string."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < self._level and not f"{record.name}.".startswith(self._families):
            return True
        key, now = (record.name, str(record.msg)), self._clock()
        since, count = self._counts.get(key, (now, 0))
        if now - since >= PERIOD_S:
            if count > LINES_MAX:
                record.msg = f"{record.msg} (and {count - LINES_MAX} more like it before)"
            since, count = now, 0
        if len(self._counts) >= WORDINGS_MAX:
            self._counts.clear()
        self._counts[key] = since, count + 1
        return count < LINES_MAX


def setup(process: str, format: Format = "text", level: Level = "info", sparse: Sequence[str] = ()) -> None:
    """Log to stderr in one format, with rate-limited warnings. Called once, at the composition root.

    `sparse`: loggers whose lines of all levels are rate-limited, including those of their children.
    """
    handler = BoundedHandler(sys.stderr)
    handler.addFilter(RateLimitFilter(logging.WARNING, sparse))
    handler.setFormatter(_Json(process) if format == "json" else _Text(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "httpcore", "urllib3", "filelock", "huggingface_hub", "transformers", "uvicorn"):
        quiet_libraries(name, logging.WARNING)


def quiet_libraries(library: str, level: int) -> None:
    """Make `library` log from `level` on and in our format only, whatever handlers it installed."""
    logger = logging.getLogger(library)
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(max(level, logging.getLogger().level))


# Writes with a time limit, for descriptors whose reader may have stopped: a terminal paused with Ctrl-S, a
# pager, a full pipe. A plain blocking write to these may block for ever.
#
# Other processes share the descriptor, so it is not made non-blocking. Instead `select` is called before each
# write, and a piece is small enough to be written without blocking (`PIPE_BUF`).

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
