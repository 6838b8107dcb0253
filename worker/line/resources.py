"""What the heartbeat tells of the process: its memory, the model's, and its age."""

from __future__ import annotations

import time

import psutil
from msgspec.structs import replace

from protocol.parts import Resources


class Meter:
    """Of this process, which is as old as the meter."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began = time.monotonic()

    def read(self, device: Resources) -> Resources:
        """`device`: as the model thread has seen it last."""
        resident = int(self._process.memory_info().rss)
        return replace(device, resident_bytes=resident, uptime_s=time.monotonic() - self._began)
