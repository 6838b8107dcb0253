"""Forwarding of a child's stderr: copied line by line, with the last lines kept for the exit message.

A pipe does not end with the child, because processes that it started may still have it open. The supervisor
therefore keeps a write end of its own, and writes a mark when the child is reaped; reading ends there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterable

from protocol.common.logs import WRITE_S_MAX, BoundedWriter

log = logging.getLogger(__name__)

LINES_KEPT = 100
LINE_BYTES_MAX = 2**16
WORDS_MAX = 500
CLOSE_WAIT_S_MAX = 5.0

_READ_BYTES = 2**17
"""More than a pipe's capacity, so that the mark, written in one piece, is read in one piece."""
_OWN_LINE = re.compile(r"\d\d:\d\d:\d\d \S+ +(?:(?P<level>debug|warning|error|critical): )?(?P<message>.*)")
_TELLING_LEVELS = ("error", "critical")
_NOISE = re.compile(r"\s|.*\(most recent call (first|last)\):$|$")
_QUOTING = re.compile(r"(\b\w*(?:Error|Exception|Exit|Interrupt))(?:: |\().*")


class QuietTerminal:
    """Filter of the log lines that a person at a terminal sees: warnings and errors, and only errors once a
    stop was requested, because lost connections are expected then. JSON and foreign lines always pass."""

    def __init__(self, to: int = 2) -> None:
        self._to = to
        self._hidden: tuple[str | None, ...] = (None, "debug")

    def shows(self, line: str) -> bool:
        own = _OWN_LINE.fullmatch(line.rstrip())
        return own is None or own["level"] not in self._hidden

    def stop(self, by: str) -> None:
        """Show errors only from now on, and confirm a Ctrl-C. `by`: the name of the signal."""
        if "warning" in self._hidden:
            return
        self._hidden = (*self._hidden, "warning")
        if by != "SIGINT":
            return
        with contextlib.suppress(OSError):
            BoundedWriter(self._to).write(b"\rStopping; Ctrl-C again stops at once.\n")


class Stderr:
    """One child's stderr. Pass `writer` to the child; call `close` when it has been reaped."""

    def __init__(
        self,
        name: str,
        to: int = 2,
        write_s_max: float = WRITE_S_MAX,
        quiet: QuietTerminal | None = None,
    ) -> None:
        """`to`: the descriptor that lines are copied to: all of them, or those that `quiet` shows.
        `write_s_max`: the timeout for its reader.

        Raises `OSError`, or `RuntimeError` if there can be no more threads."""
        self._name = name
        self._quiet = quiet
        self._to = BoundedWriter(to, write_s_max)
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._rest = b""
        self._mark = os.urandom(16)
        self._reader, self.writer = os.pipe()
        self._thread = threading.Thread(target=self._copy, name=f"stderr-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._reader)
            os.close(self.writer)
            raise

    def close(self) -> str:
        """Copy the rest and return the child's last message."""
        os.write(self.writer, self._mark)
        self._thread.join(CLOSE_WAIT_S_MAX)
        os.close(self.writer)
        return stderr_tail(list(self._lines))

    def _copy(self) -> None:
        while chunk := os.read(self._reader, _READ_BYTES):
            data, mark, _ = chunk.partition(self._mark)
            self._take(data)
            if mark:
                break
        os.close(self._reader)
        self._pass_on(self._rest + b"\n" if self._rest else b"")

    def _take(self, chunk: bytes) -> None:
        # Write whole lines at once: other children write to the same descriptor. Progress bars end in "\r".
        data = self._rest + chunk
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut and len(data) > LINE_BYTES_MAX:
            cut = len(data)
        self._pass_on(data[:cut])
        self._rest = data[cut:]

    def _pass_on(self, lines: bytes) -> None:
        self._lines.extend(lines.decode(errors="replace").splitlines())
        if self._quiet is not None:
            shown = self._quiet.shows
            each = lines.splitlines(keepends=True)
            lines = b"".join(line for line in each if shown(line.decode(errors="replace")))
        # If our stderr has no reader, or a slow one, the child must not hang nor its exit be missed.
        with contextlib.suppress(OSError):
            if self._to.write(lines) and (dropped := self._to.take_dropped()):
                log.warning("dropped %d bytes of %s's stderr: the reader is too slow", dropped, self._name)


def stderr_tail(lines: Iterable[str]) -> str:
    """Return a process's message about its end in one line, or "". It never contains a prompt.

    That is the last line on its stderr unless that is an ordinary log line of ours. Of an exception only the
    type is returned: its message may quote the request being processed.
    """
    for line in reversed(list(lines)):
        if _NOISE.match(line):
            continue
        level, message = _read_own(line)
        if level is not None and level not in _TELLING_LEVELS:
            return ""  # it ran normally until its end
        printable = "".join(c if c.isprintable() else " " for c in _QUOTING.sub(r"\1", message))
        return printable[:WORDS_MAX].strip()
    return ""


def _read_own(line: str) -> tuple[str | None, str]:
    """Split a log line of `common.logs` into level and message; return None and the line for any other."""
    if own := _OWN_LINE.fullmatch(line):
        return own["level"] or "info", own["message"]
    if line.startswith("{"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            return str(record["level"]), str(record["message"])
    return None, line
