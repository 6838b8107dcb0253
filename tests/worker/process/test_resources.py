"""Resource usage of a worker's process, as it measures itself."""

from __future__ import annotations

import psutil

from protocol.types import Resources
from worker.process.resources import ProcessMetrics


def test_the_process_measures_itself_and_passes_on_what_the_model_takes() -> None:
    meter = ProcessMetrics()
    device = Resources(device_bytes=1, device_peak_bytes=2, device_spare_bytes=3)
    first, second = meter.read(device), meter.read(Resources())
    assert (first.device_bytes, first.device_peak_bytes, first.device_spare_bytes) == (1, 2, 3)
    held = psutil.Process().memory_info().rss
    assert held / 2 < first.resident_bytes < held * 2
    assert held / 4 < first.footprint_bytes < held * 2
    assert 0 <= first.uptime_s < second.uptime_s < 60
    assert second.device_bytes == 0
