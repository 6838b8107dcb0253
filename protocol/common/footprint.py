"""Footprint of a process: its memory as the system counts it when it decides whom to end.

macOS compares `phys_footprint` with its limits: dirty pages, also those that it has compressed or swapped,
and what the GPU's driver has allocated for the process. Resident memory lacks the latter two, and MLX counts
only its own arrays. libproc's rusage has it, for every process of the user (struct rusage_info_v0 of
sys/resource.h). Not tried on a Mac.

On Linux the footprint is what stands closest: anonymous and shared pages, resident or swapped. A GPU's
memory is not in it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

_FLAVOR = 0
"""RUSAGE_INFO_V0."""
_LINUX_FIELDS = ("RssAnon", "RssShmem", "VmSwap")


class RusageInfo(ctypes.Structure):
    """struct rusage_info_v0."""

    _fields_: ClassVar = [
        ("ri_uuid", ctypes.c_uint8 * 16),
        *(
            (f"ri_{name}", ctypes.c_uint64)
            for name in (
                "user_time",
                "system_time",
                "pkg_idle_wkups",
                "interrupt_wkups",
                "pageins",
                "wired_size",
                "resident_size",
                "phys_footprint",
                "proc_start_abstime",
                "proc_exit_abstime",
            )
        ),
    ]


def footprint_bytes(pid: int | None = None, platform: str = sys.platform) -> int:
    """Return the footprint of a process, by default this one; 0: unknown, or it has ended."""
    pid = os.getpid() if pid is None else pid
    if platform == "darwin":
        return read_rusage(_libproc(), pid)
    try:
        return parse_status(Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return 0


def read_rusage(library: Any, pid: int) -> int:
    """Return the footprint by `library`, an object with libproc's functions; 0: it refuses."""
    info = RusageInfo()
    try:
        refused = library.proc_pid_rusage(pid, _FLAVOR, ctypes.byref(info))
    except AttributeError:  # there is no such function
        return 0
    return 0 if refused else int(info.ri_phys_footprint)


def parse_status(text: str) -> int:
    """Return the footprint by the content of /proc/PID/status."""
    fields = dict(line.split(":", 1) for line in text.split("\n") if ":" in line)
    return sum(1024 * int(fields[name].split()[0]) for name in _LINUX_FIELDS if name in fields)


@cache
def _libproc() -> Any:
    try:
        return ctypes.CDLL("/usr/lib/libproc.dylib", use_errno=True)
    except OSError:
        return None
