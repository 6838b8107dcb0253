"""Memory of this machine that a model can use."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import psutil

HEADROOM = 0.1
"""Default share that a worker leaves free."""

_GB = 10**9
_SMALL_MAC_BYTES = 36 * 2**30
SYSCTL_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory in bytes. `usable`: the part of `total` that the GPU may use. `wired_limit`: None if not set."""

    total: int
    available: int
    usable: int
    wired_limit: int | None = None

    @property
    def for_model(self) -> int:
        """Memory for weights and caches together."""
        return int(self.usable * (1 - HEADROOM))


def usable_of_mac(total: int, wired_limit: int | None) -> int:
    """Return the GPU's limit on macOS: by default two thirds, above 36 GiB three quarters."""
    if wired_limit:
        return min(total, wired_limit)
    return total * 2 // 3 if total <= _SMALL_MAC_BYTES else total * 3 // 4


def read_memory(platform: str = sys.platform) -> MachineMemory:
    """Return the current state."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    if platform != "darwin":
        return MachineMemory(total, available, total)
    wired = _wired_limit()
    return MachineMemory(total, available, usable_of_mac(total, wired), wired)


def _wired_limit() -> int | None:
    """Return `sysctl iogpu.wired_limit_mb` in bytes; None if it is not set or does not exist."""
    try:
        told = subprocess.run(
            ["sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True, timeout=SYSCTL_S_MAX
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return int(told) * 2**20 if told.isdigit() and int(told) else None
