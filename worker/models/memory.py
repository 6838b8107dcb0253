"""Memory budget: what the model may use, what remains for KV caches, and MLX's limits.

Weights and caches together stay below the machine's memory minus a headroom, which is left for activations,
for MLX's buffer cache, and for other processes. A request that would exceed it waits, because a failed
allocation would end the process.

Weights larger than the machine's memory are refused permanently. If they only do not fit now, the worker
waits: memory of a killed process returns late, on macOS sometimes never. Every worker checks for itself; the
supervisor's check before a reload (`deploy`) only decides whether the old worker may keep running meanwhile.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass

import mlx.core as mx
import psutil

from protocol.types import Resources

log = logging.getLogger(__name__)

MEMORY_WAIT_S = 30.0
MEMORY_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """`limit`: bytes that the process may use. `headroom`: share of it to keep free, 0 to 1."""

    limit: int
    headroom: float

    @property
    def usable(self) -> int:
        """Bytes for weights and caches."""
        return int(self.limit * (1 - self.headroom))

    def left_for_caches(self, weight_bytes: int) -> int:
        """Return the bytes for the caches of all requests, beside weights of `weight_bytes`."""
        return max(0, self.usable - weight_bytes)


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Memory available to a model in bytes: `total` if it were alone, `free` now."""

    total: int
    free: int


def read_memory() -> AvailableMemory:
    """Return the GPU's memory if MLX reports it, else the machine's."""
    device, machine = mx.device_info(), psutil.virtual_memory()
    if (working_set := device.get("max_recommended_working_set_size")) is not None:
        # Apple's memory is unified; macOS can page out or compress everything that is not wired.
        wired = getattr(machine, "wired", 0)
        return AvailableMemory(int(working_set), min(int(working_set), int(machine.total) - int(wired)))
    if (free := device.get("free_memory")) is not None:
        return AvailableMemory(int(device.get("total_memory", free)), int(free))
    return AvailableMemory(int(machine.total), int(machine.available))


def await_memory(weight_bytes: int, headroom: float) -> MemoryBudget:
    """Return the budget as soon as the weights fit, or after `MEMORY_WAIT_S` seconds."""
    budget, over_at = MemoryBudget(read_memory().free, headroom), time.monotonic() + MEMORY_WAIT_S
    if weight_bytes > budget.usable:
        log.warning("waiting for memory: %d bytes are free, the weights take %d", budget.limit, weight_bytes)
    while weight_bytes > budget.usable and time.monotonic() < over_at:
        time.sleep(MEMORY_POLL_S)  # there is no notification of free memory
        budget = MemoryBudget(read_memory().free, headroom)
    return budget


def taken() -> Resources:
    """Return the memory that MLX uses."""
    return Resources(
        device_bytes=mx.get_active_memory(),
        device_peak_bytes=mx.get_peak_memory(),
        device_spare_bytes=mx.get_cache_memory(),
    )


def apply(budget: MemoryBudget) -> None:
    """Set MLX's limits. Its buffer cache gets at most half of the headroom."""
    if (working_set := mx.device_info().get("max_recommended_working_set_size")) is not None:
        # As in upstream; otherwise macOS pages weights out between requests.
        mx.set_wired_limit(int(working_set))
    mx.set_cache_limit(int(budget.limit * budget.headroom / 2))


def release() -> None:
    """Free what a failed load has left in reference cycles and in MLX's buffer cache."""
    gc.collect()
    mx.clear_cache()
