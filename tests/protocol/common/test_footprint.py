"""The footprint of a process: on this system, and on a stand-in for macOS's libproc."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
import sys

from protocol.common.footprint import RusageInfo, footprint_bytes, parse_status, read_rusage

STATUS = """Name:\tpython
VmRSS:\t  9000 kB
RssAnon:\t    1000 kB
RssFile:\t    7000 kB
RssShmem:\t      24 kB
VmSwap:\t      10 kB
"""


class Libproc:
    """Writes what macOS writes, by offset and not by our structure."""

    def __init__(self, footprint: int, status: int = 0) -> None:
        self.footprint, self.status = footprint, status
        self.asked: tuple[int, int] | None = None

    def proc_pid_rusage(self, pid: int, flavor: int, buffer: object) -> int:
        self.asked = pid, flavor
        info = buffer._obj  # type: ignore[attr-defined]
        numbers = [1, 2, 3, 4, 5, 6, 7, self.footprint, 9, 10]
        ctypes.memmove(ctypes.addressof(info), struct.pack("=16s10Q", b"u" * 16, *numbers), 96)
        return self.status


def test_macos_reports_the_footprint_in_its_structure() -> None:
    library = Libproc(5 * 2**30)
    assert read_rusage(library, 42) == 5 * 2**30
    assert library.asked == (42, 0)
    assert ctypes.sizeof(RusageInfo) == 96
    assert RusageInfo.ri_phys_footprint.offset == 72
    for unknown in (Libproc(5, status=-1), object(), None):
        assert read_rusage(unknown, 42) == 0


def test_linux_counts_what_it_could_only_swap() -> None:
    assert parse_status(STATUS) == 1034 * 1024
    assert parse_status("Name:\tkthread\n") == 0


def test_memory_that_is_written_is_in_the_footprint() -> None:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # fresh pages: a heap may have as much to give away
    with mmap.mmap(-1, 64 * 2**20, flags=private) as fresh:
        before = footprint_bytes()
        for page in range(0, len(fresh), mmap.PAGESIZE):
            fresh[page] = 1
        assert footprint_bytes(os.getpid()) - before > 48 * 2**20
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    assert footprint_bytes(child.pid) == 0
