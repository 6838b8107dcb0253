"""How much of this machine's memory a model may take."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import psutil

HEADROOM = 0.1
"""The share that a worker leaves free, where nothing else is said."""

_GB = 10**9
_SMALL_MAC_BYTES = 36 * 2**30
SYSCTL_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes. `usable`: what the GPU may have of `total`. `wired_limit`: where somebody has set it."""

    total: int
    available: int
    usable: int
    wired_limit: int | None = None

    @property
    def for_model(self) -> int:
        """For weights and caches together."""
        return int(self.usable * (1 - HEADROOM))


def usable_of_mac(total: int, wired_limit: int | None) -> int:
    """What macOS lets the GPU have: by itself two thirds, of a larger machine three quarters."""
    if wired_limit:
        return min(total, wired_limit)
    return total * 2 // 3 if total <= _SMALL_MAC_BYTES else total * 3 // 4


def look(platform: str = sys.platform) -> Memory:
    """As it is now."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    if platform != "darwin":
        return Memory(total, available, total)
    wired = _wired_limit()
    return Memory(total, available, usable_of_mac(total, wired), wired)


def _wired_limit() -> int | None:
    """`sysctl iogpu.wired_limit_mb`; None: it is not set, or not there."""
    try:
        told = subprocess.run(
            ["sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True, timeout=SYSCTL_S_MAX
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return int(told) * 2**20 if told.isdigit() and int(told) else None
