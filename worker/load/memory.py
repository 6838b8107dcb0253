"""Memory budget: what the model may use, what remains for KV caches, and MLX's limits.

Weights and caches together stay below the machine's memory minus a headroom, which is left for activations,
for MLX's buffer cache, and for other processes. A request that would exceed it waits, because a failed
allocation would end the process.

Weights larger than the machine's memory are refused permanently. If they only do not fit now, the worker
waits: memory of a killed process returns late, on macOS sometimes never. Every worker checks for itself; the
supervisor's check before a reload (`deploy`) only decides whether the old worker may keep running meanwhile.

Wired memory: MLX adds each buffer below its wired limit to a residency set, and commits the set for each new
buffer and each one released. With a limit above the weights that goes on while requests run, which has made
macOS panic (mlx 3186). With a limit at the weights the sets do not change after the load (`wire`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import psutil

from protocol.types import Resources, Wired

log = logging.getLogger(__name__)

MEMORY_WAIT_S = 30.0
MEMORY_POLL_S = 0.5

_HEAP_BYTES = 2**20
"""MLX's heap of small buffers, which counts as one of its buffers."""
_PAGE_BYTES = 16384


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

    def left_beside(self, footprint: int) -> int:
        """Return the bytes for caches beside the whole loaded process, which may use the headroom too."""
        return max(0, self.limit - footprint)


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
    mx.set_cache_limit(int(budget.limit * budget.headroom / 2))


def wire(wired: Wired, tensors: Iterable[int]) -> int:
    """Wire the memory of a loaded model, so that macOS does not page it out between requests. Return the
    limit in bytes; 0: nothing is wired, as always without Metal.

    `tensors`: sizes of the weights in bytes. Call once, when nothing but the model is in memory.
    """
    working_set = mx.device_info().get("max_recommended_working_set_size")
    if working_set is None or wired == "none":
        return 0
    release()
    limit = int(working_set)
    if wired == "weights":
        limit = min(limit, whole_pages(mx.get_active_memory(), tensors))
    mx.set_wired_limit(limit)
    log.info("%d bytes of memory are wired", limit)
    return limit


def whole_pages(active: int, tensors: Iterable[int]) -> int:
    """Return the bytes of the pages of `active` bytes of arrays, which include `tensors`.

    MLX counts arrays, macOS pages. If the limit were `active`, a large weight could be left out of the
    residency set, and the room would be filled with the buffers of requests.
    """
    return active + _HEAP_BYTES + sum(_PAGE_BYTES - size for size in tensors if 0 < size < _PAGE_BYTES)


def release() -> None:
    """Give the memory of reference cycles, MLX's buffer cache and glibc's free blocks back to the system."""
    gc.collect()
    mx.clear_cache()
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
