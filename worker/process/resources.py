"""Process metrics for the heartbeat: memory and uptime."""

from __future__ import annotations

import time

import psutil
from msgspec.structs import replace

from protocol.common.footprint import footprint_bytes
from protocol.types import Resources


class ProcessMetrics:
    """Metrics of this process. Uptime counts from the construction."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began = time.monotonic()

    def read(self, device: Resources) -> Resources:
        """Return `device`, the model thread's last memory usage, with this process's memory and uptime."""
        return replace(
            device,
            resident_bytes=int(self._process.memory_info().rss),
            footprint_bytes=footprint_bytes(),
            uptime_s=time.monotonic() - self._began,
        )
