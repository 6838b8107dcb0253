"""Memory pressure of the machine, as the operating system reports it.

macOS: the kernel's level, which also decides when it notifies and ends processes (xnu, kern_memorystatus.c).
Not tried on a Mac. Linux: PSI, the share of the last ten seconds in which tasks waited for memory: of the
machine, and of the process's control group, which may have a limit of its own (Documentation/accounting/psi).
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class PressureLevel(IntEnum):
    """How short of memory the machine is."""

    NONE = 0
    WARNING = 1
    CRITICAL = 2


WARNING_SOME = 10.0
"""Percent of the time in which some task waited for memory that are a warning: programs become slow."""
CRITICAL_SOME, CRITICAL_FULL = 40.0, 10.0
"""The same for critical pressure, and percent of the time in which all tasks waited: the system does little
else. The latter stays low where a worker computes, which does not wait: 6% beside four hogs with 41%."""
_SYSCTL = b"kern.memorystatus_vm_pressure_level"
_DARWIN_LEVELS = {2: PressureLevel.WARNING, 4: PressureLevel.CRITICAL}
_MACHINE = "/proc/pressure/memory"
_GROUP_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
"""Where version 2 is mounted, alone or beside version 1."""

PressureSource = Callable[[], PressureLevel]


def pressure_source(platform: str = sys.platform) -> PressureSource:
    """Return this machine's source; one that reports no pressure where the system does not tell."""
    if platform == "darwin":
        return lambda: read_sysctl(ctypes.CDLL(None))
    return StallFiles([Path(_MACHINE), *_group_files()])


def read_sysctl(library: Any) -> PressureLevel:
    """Return the level by `library`, an object with the C library's functions."""
    value = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    if library.sysctlbyname(_SYSCTL, ctypes.byref(value), ctypes.byref(size), None, 0):
        return PressureLevel.NONE
    return _DARWIN_LEVELS.get(value.value, PressureLevel.NONE)


class StallFiles:
    """Source that reads files in PSI's format; the highest level counts. Those that cannot be read are left
    out from then on."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = list(files)

    def __call__(self) -> PressureLevel:
        return max(map(self._read, list(self._files)), default=PressureLevel.NONE)

    def _read(self, file: Path) -> PressureLevel:
        try:
            return level_of(file.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:  # no PSI in this kernel, or it is switched off
            log.debug("%s does not tell the memory pressure: %s", file, error)
            self._files.remove(file)
            return PressureLevel.NONE


def level_of(text: str) -> PressureLevel:
    """Return the level by the content of a PSI file. Raises `ValueError`."""
    shares = {}
    for line in text.splitlines():
        kind, *fields = line.split()
        shares[kind] = float(dict(field.split("=", 1) for field in fields)["avg10"])
    some, full = shares.get("some", 0.0), shares.get("full", 0.0)
    if some >= CRITICAL_SOME or full >= CRITICAL_FULL:
        return PressureLevel.CRITICAL
    return PressureLevel.WARNING if some >= WARNING_SOME else PressureLevel.NONE


def _group_files() -> list[Path]:
    """Return the file of the control group that this process is in; empty: there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    groups = [line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")]
    files = (Path(root, group, "memory.pressure") for group in groups for root in _GROUP_ROOTS)
    return [file for file in files if file.exists()][:1]
