"""How much memory the model may take, what of it is left for caches, and what MLX is told of that.

Weights and caches together stay below what the machine has, less a share that is kept free: for activations,
for buffers that MLX keeps for reuse, and for everybody else. A request that would go beyond it waits: an
allocation that fails would end the process.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import mlx.core as mx
import psutil


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


def available_bytes() -> int:
    """Memory a model could take now: what the GPU recommends or has free, else what the machine has."""
    device = mx.device_info()
    for key in ("max_recommended_working_set_size", "free_memory"):
        if key in device:
            return int(device[key])
    return int(psutil.virtual_memory().available)


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
