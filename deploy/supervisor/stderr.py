"""A child's stderr on its way through the supervisor: passed on line by line, its last words remembered.

The end of a pipe's data is not the end of the child: whoever it has started may hold the pipe open. So the
supervisor keeps a writing end of its own, and when the child is reaped writes a mark: no more is waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections import deque
from collections.abc import Iterable

LINES_KEPT = 100
LINE_BYTES_MAX = 2**16
WORDS_MAX = 200
CLOSE_WAIT_S_MAX = 5.0

_READ_BYTES = 2**17
"""More than a pipe holds: the mark, written in one piece, is read in one."""
_OWN_LINE = re.compile(r"\d\d:\d\d:\d\d \S+ +(?:(?P<level>[a-z]+): )?(?P<message>.*)")
_TELLING_LEVELS = ("error", "critical")
_NOISE = re.compile(r"\s|.*\(most recent call (first|last)\):$|$")
_QUOTING = re.compile(r"(\b\w*(?:Error|Exception|Exit|Interrupt))(?:: |\().*")


class Stderr:
    """One child's stderr. Hand `writer` to the child; `close` when it has been reaped."""

    def __init__(self, name: str, to: int = 2) -> None:
        """`to`: the descriptor that all of it is written to."""
        self._to = to
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._rest = b""
        self._mark = os.urandom(16)
        self._reader, self.writer = os.pipe()
        self._thread = threading.Thread(target=self._copy, name=f"stderr-{name}", daemon=True)
        self._thread.start()

    def close(self) -> str:
        """The child's last words, once all that it wrote has been passed on."""
        os.write(self.writer, self._mark)
        self._thread.join(CLOSE_WAIT_S_MAX)
        os.close(self.writer)
        return last_words(list(self._lines))

    def _copy(self) -> None:
        while chunk := os.read(self._reader, _READ_BYTES):
            data, mark, _ = chunk.partition(self._mark)
            self._take(data)
            if mark:
                break
        os.close(self._reader)
        self._pass_on(self._rest + b"\n" if self._rest else b"")

    def _take(self, chunk: bytes) -> None:
        # Whole lines, in one piece: the other children write to the same place. Progress bars end in "\r".
        data = self._rest + chunk
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut and len(data) > LINE_BYTES_MAX:
            cut = len(data)
        self._pass_on(data[:cut])
        self._rest = data[cut:]

    def _pass_on(self, lines: bytes) -> None:
        self._lines.extend(lines.decode(errors="replace").splitlines())
        with contextlib.suppress(OSError):  # nobody reads ours any more: the child must not hang for that
            while lines:
                lines = lines[os.write(self._to, lines) :]


def last_words(lines: Iterable[str]) -> str:
    """What a process said of its end, in a line: "" if nothing. Never a prompt.

    That is the last line of its stderr that is no ordinary log line of ours. Of an exception only the type is
    told: its message may quote what the process was working on.
    """
    for line in reversed(list(lines)):
        if _NOISE.match(line):
            continue
        level, message = _read_own(line)
        if level is not None and level not in _TELLING_LEVELS:
            return ""  # it went about its business until the end
        printable = "".join(c if c.isprintable() else " " for c in _QUOTING.sub(r"\1", message))
        return printable[:WORDS_MAX].strip()
    return ""


def _read_own(line: str) -> tuple[str | None, str]:
    """Level and message of a line by `protocol.logs`; None and the line if it is none."""
    if own := _OWN_LINE.fullmatch(line):
        return own["level"] or "info", own["message"]
    if line.startswith("{"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            return str(record["level"]), str(record["message"])
    return None, line
