#!/usr/bin/env python3
"""Stand-in for `ssh -tt`: runs the command here, on a terminal of its own.

Writes the host, the command, and what passes in both directions to files beside itself.
"""

from __future__ import annotations

import os
import pty
import select
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def note(name: str, data: bytes) -> None:
    with (FOLDER / name).open("ab") as file:
        file.write(data)


def main() -> int:
    words = sys.argv[1:]
    while words[0].startswith("-"):
        del words[: 2 if words[0] == "-o" else 1]
    host, command = words
    note("host", host.encode())
    note("command", command.encode())
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv("/bin/bash", ["bash", "-c", command])
    inputs = {0: "input", terminal: "output"}
    while True:
        for fd in select.select(list(inputs), [], [])[0]:
            try:
                data = os.read(fd, 4096)
            except OSError:  # the terminal is closed
                data = b""
            if not data and fd == terminal:
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if not data:
                del inputs[fd]
                continue
            note(inputs[fd], data)
            os.write(1 if fd == terminal else terminal, data)


if __name__ == "__main__":
    sys.exit(main())
