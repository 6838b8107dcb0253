"""Commands in a pseudoterminal, and the screen that their output leaves."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Sequence

WAIT_S = 60.0
COLUMNS, LINES = 100, 40
_CONTROL = re.compile(r"\x1b\[\??([0-9;]*)([A-Za-z])|\x1b[=>]|[\r\n\x08\x07]")


class Terminal:
    """A command in a pseudoterminal. `output`: all that it has written; `seen`: not yet matched."""

    def __init__(self, argv: Sequence[str], env: dict[str, str]) -> None:
        self.seen = self.output = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            size = {"TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
            os.execve(argv[0], [*argv], os.environ | size | env)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait(self, text: str) -> None:
        """Wait until `text` appears after the previous match."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen!r}"
            if select.select([self._fd], [], [], left)[0]:
                self._read()
        self.seen = self.seen[self.seen.index(text) + len(text) :]

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65_536)
        except OSError:  # the command has closed its end
            data = b""
        assert data, f"the command has exited: {self.seen!r}"
        self.seen += data.decode(errors="replace")
        self.output += data.decode(errors="replace")

    def kill(self) -> None:
        if self._fd >= 0:
            os.kill(self.pid, signal.SIGKILL)
            self.end()

    def end(self) -> int:
        deadline = time.monotonic() + WAIT_S
        while select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                data = os.read(self._fd, 65_536)
            except OSError:
                break
            if not data:
                break
            self.output += data.decode(errors="replace")
        os.close(self._fd)
        self._fd = -1
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def screen(output: str, columns: int = COLUMNS) -> list[str]:
    """Return the lines that the output leaves on a screen that never scrolls.

    As in xterm, a character in the last column leaves the cursor there; the next one wraps.
    """
    lines, row, column = [""], 0, 0
    position = 0
    while position < len(output):
        control = _CONTROL.match(output, position)
        if control is None:
            if column == columns:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            line = lines[row].ljust(column)
            lines[row] = line[:column] + output[position] + line[column + 1 :]
            position, column = position + 1, column + 1
            continue
        position = control.end()
        count = int(control[1]) if (control[1] or "").isdigit() else 1
        match control[2] or control[0]:
            case "\r":
                column = 0
            case "\n":
                row += 1
            case "A":
                row = max(0, row - count)
            case "K":
                lines += [""] * (row + 1 - len(lines))
                lines[row] = "" if control[1] == "2" else lines[row][:column]
    return [line.rstrip() for line in lines]
