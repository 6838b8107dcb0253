"""Launcher under launchd, `python -m deploy.units.launchd_shim … -- COMMAND`: what only systemd does itself.

launchd restarts a failing job for ever: a model that cannot be loaded was once loaded 233 times in a row.
So starts are counted in a file, and after too many this exits with status 0, which launchd does not restart.
For wrong settings the command itself does so, at once (`protocol.settings.job_status`).
launchd's sockets must be requested; they are passed on as by systemd, with sd_listen_fds(3). The command
then replaces this process, so that the job's process is the server itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import sys
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from deploy.supervisor.restarts import RestartLimits
from protocol.settings.job_status import VARIABLE, exits_for_manager
from protocol.settings.reader import exit_with

PROGRAM = "roundhouse service"
FIRST_HANDED_OVER = 3


def recent_starts(starts: Sequence[float], now: float, window_s: float) -> list[float]:
    """Return the starts within the window. One in the future was recorded before the clock was set back."""
    return [start for start in starts if now - window_s <= start <= now]


def note_start(file: Path, starts_max: int, now: float, window_s: float) -> bool:
    """Record a start and return True, or return False if there were too many.

    If the file cannot be read or written, starts are not counted: that must not keep a server down.
    """
    try:
        noted = [float(word) for word in file.read_text(encoding="utf-8").split()]
    except (OSError, ValueError):
        noted = []
    starts = recent_starts(noted, now, window_s)
    if len(starts) >= starts_max:
        return False
    with contextlib.suppress(OSError):
        file.write_text("".join(f"{start}\n" for start in [*starts, now]), encoding="utf-8")
    return True


def ask_for_sockets(name: str, library: Any) -> list[int]:
    """Return the descriptors of the plist's sockets `name`. `library`: libSystem. Raises `OSError`."""
    numbers, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    error = library.launch_activate_socket(name.encode(), ctypes.byref(numbers), ctypes.byref(count))
    if error:
        raise OSError(error, os.strerror(error))
    return numbers[: count.value]  # the array is not freed: this process is about to be replaced


def hand_over(sockets: Sequence[int], environ: MutableMapping[str, str], pid: int) -> None:
    """Move sockets to the descriptors at which the command that replaces this process expects them."""
    places = range(FIRST_HANDED_OVER, FIRST_HANDED_OVER + len(sockets))
    # Copy them to higher numbers first: none may be overwritten before it is in its own place.
    above = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, places.stop) for number in sockets]
    for number in sockets:
        os.set_inheritable(number, False)
    for place, number in zip(places, above, strict=True):
        os.dup2(number, place, inheritable=True)
    environ["LISTEN_PID"], environ["LISTEN_FDS"] = str(pid), str(len(sockets))


@exits_for_manager()
def main() -> None:
    """Replace this process with the command, or exit with status 0 if it was started too often."""
    parser = argparse.ArgumentParser(prog="python -m deploy.units.launchd_shim")
    parser.add_argument("--starts-file", type=Path, required=True)
    parser.add_argument("--starts-max", type=int, required=True)
    parser.add_argument("--socket")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    window_s = RestartLimits().window_s
    os.environ[VARIABLE] = str(os.getpid())
    try:
        if not note_start(arguments.starts_file, arguments.starts_max, time.time(), window_s):
            why = f"started {arguments.starts_max} times within {window_s:g} s, giving up"
            print(f"{PROGRAM}: {why}; `roundhouse service install` starts it again", file=sys.stderr)
            raise SystemExit(0)
        if arguments.socket and os.environ.get("LISTEN_PID") != str(os.getpid()):  # else they are inherited
            hand_over(ask_for_sockets(arguments.socket, ctypes.CDLL(None)), os.environ, os.getpid())
        os.execv(arguments.command[0], arguments.command)
    except OSError as error:
        exit_with(PROGRAM, f"cannot start {' '.join(arguments.command)}: {error}")


if __name__ == "__main__":
    main()
