"""How much memory the model may take, what of it is left for caches, and what MLX is told of that.

Weights and caches together stay below what the machine has, less a share that is kept free: for activations,
for buffers that MLX keeps for reuse, and for everybody else. A request that would go beyond it waits: an
allocation that fails would end the process.

Weights that the machine can never hold are refused for good. Those that it cannot hold just now are waited
for: what a process that was killed has taken comes back late, on macOS sometimes not at all. Every worker
looks by itself, however it was started: the supervisor's look before a reload (`deploy`) only decides
whether the old worker may stay meanwhile.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass

import mlx.core as mx
import psutil

from protocol.parts import Resources

log = logging.getLogger(__name__)

ROOM_WAIT_S = 30.0
ROOM_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Budget:
    """`limit`: bytes the process may take. `headroom`: the share of it that is kept free, 0 to 1."""

    limit: int
    headroom: float

    @property
    def usable(self) -> int:
        """Bytes for weights and caches."""
        return int(self.limit * (1 - self.headroom))

    def left_for_caches(self, weight_bytes: int) -> int:
        """Bytes for the caches of all requests, beside a model of `weight_bytes`."""
        return max(0, self.usable - weight_bytes)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a model could take: `total` if it were alone, `free` at this moment."""

    total: int
    free: int


def look() -> Memory:
    """The GPU's memory where it says something about it, else the machine's."""
    device, machine = mx.device_info(), psutil.virtual_memory()
    if (working_set := device.get("max_recommended_working_set_size")) is not None:
        # Apple's memory is one for all. Whatever is not wired, macOS can move out of a model's way.
        wired = getattr(machine, "wired", 0)
        return Memory(int(working_set), min(int(working_set), int(machine.total) - int(wired)))
    if (free := device.get("free_memory")) is not None:
        return Memory(int(device.get("total_memory", free)), int(free))
    return Memory(int(machine.total), int(machine.available))


def await_room(weight_bytes: int, headroom: float) -> Budget:
    """What there is once the weights fit, or when they still do not after `ROOM_WAIT_S`."""
    budget, over_at = Budget(look().free, headroom), time.monotonic() + ROOM_WAIT_S
    if weight_bytes > budget.usable:
        log.warning("waiting for memory: %d bytes are free, the weights take %d", budget.limit, weight_bytes)
    while weight_bytes > budget.usable and time.monotonic() < over_at:
        time.sleep(ROOM_LOOK_S)  # nothing tells when memory becomes free
        budget = Budget(look().free, headroom)
    return budget


def taken() -> Resources:
    """What MLX holds."""
    return Resources(
        device_bytes=mx.get_active_memory(),
        device_peak_bytes=mx.get_peak_memory(),
        device_spare_bytes=mx.get_cache_memory(),
    )


def apply(budget: Budget) -> None:
    """Tell MLX. Buffers that it keeps for reuse take half of the headroom at the most."""
    if (working_set := mx.device_info().get("max_recommended_working_set_size")) is not None:
        # As upstream does: otherwise macOS pages weights out between requests.
        mx.set_wired_limit(int(working_set))
    mx.set_cache_limit(int(budget.limit * budget.headroom / 2))


def release() -> None:
    """Give back what a failed load has left in cycles and in MLX's own cache."""
    gc.collect()
    mx.clear_cache()
