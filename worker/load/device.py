"""Device of a process: whether the weights fit into its memory, and the settings of MLX."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.common.error_text import in_bytes
from protocol.common.footprint import footprint_bytes
from protocol.types import Wired
from worker.interfaces import InsufficientMemoryError, ModelError
from worker.load.source import tensor_sizes

if TYPE_CHECKING:
    from worker.load.memory import MemoryBudget
    from worker.load.options import LoadOptions

log = logging.getLogger(__name__)


def prepare_device(budget: MemoryBudget, *, is_exact: bool = False) -> None:
    """Apply memory limits, check the compiler, and choose how layers without a kernel run. Call before the
    first array is created. `is_exact`: results must be upstream's, bit by bit."""
    import mlx.core as mx

    from worker.load import gated_delta, memory

    memory.apply(budget)
    if mx.default_device() == mx.cpu:
        ensure_compiler()
    if not is_exact:
        gated_delta.install_chunked()


def ensure_compiler() -> None:
    """Disable kernel fusion if it does not work: on a CPU, MLX fuses kernels with g++ at first use."""
    import mlx.core as mx

    if shutil.which("g++") is None:
        mx.disable_compile()
        log.info("no C++ compiler (g++) found: kernels are not fused, decoding is a little slower")
        return
    try:
        mx.eval(mx.compile(lambda x: mx.exp(x) * 2 + x)(mx.zeros(4)))
    except RuntimeError as error:
        mx.disable_compile()
        reason = str(error).splitlines()[0]
        log.warning("the C++ compiler does not work, so kernels are not fused: %s", reason)


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Memory limits of one process. `name`: its model. `headroom`: share to keep free. `limit`: replaces the
    machine's memory, in bytes. `max_bytes`: upper bound of the process in bytes. `wired`: the memory that is
    wired."""

    name: str
    headroom: float = 0.1
    limit: int | None = None
    max_bytes: int | None = None
    wired: Wired = "weights"

    @classmethod
    def of(cls, name: str, options: LoadOptions) -> MemoryFit:
        limits = options.memory_headroom, options.memory_limit_bytes, options.memory_budget
        return cls(name, *limits, options.wired)

    def budget(self, weight_bytes: int) -> MemoryBudget:
        """Return the budget of the process. Raises `ModelError` if the weights can never fit, and
        `InsufficientMemoryError` if they do not fit now."""
        from worker.load import memory

        max_bytes = self._within_share(memory.read_memory().total if self.limit is None else self.limit)
        if weight_bytes > max_bytes.usable:
            raise ModelError(
                f"{self._too_large(weight_bytes, max_bytes)} Choose a smaller or more strongly quantized "
                "model: `roundhouse pull` names some that fit."
            )
        if self.limit is not None:
            return max_bytes
        budget = memory.await_memory(weight_bytes, self.headroom)
        if weight_bytes > budget.usable:
            raise InsufficientMemoryError(f"{self._too_large(weight_bytes, budget)} Close other programs.")
        return self._within_share(budget.limit)

    def left_for_caches(self, budget: MemoryBudget, weight_bytes: int, platform: str = sys.platform) -> int:
        """Return the bytes for caches, when the model is loaded. On macOS the footprint of the process counts
        too: what libraries, buffers and the driver take beyond weights and headroom is missing to caches."""
        left = budget.left_for_caches(weight_bytes)
        if self.limit is not None or platform != "darwin" or not (footprint := footprint_bytes()):
            return left
        beside = budget.left_beside(footprint)
        if beside < left:
            told = "%s: macOS counts %s for this process, so %s instead of %s are left for caches"
            log.warning(told, self.name, in_bytes(footprint), in_bytes(beside), in_bytes(left))
        return min(left, beside)

    def wire(self, files: Sequence[Path]) -> None:
        """Wire the loaded weights of these files as configured. Call on the model thread."""
        from worker.load import memory

        memory.wire(self.wired, tensor_sizes(files))

    def _within_share(self, limit: int) -> MemoryBudget:
        """Return the budget within `limit` available bytes."""
        from worker.load.memory import MemoryBudget

        return MemoryBudget(min(limit, self.max_bytes or limit), self.headroom)

    def _too_large(self, weight_bytes: int, budget: MemoryBudget) -> str:
        return (
            f"{self.name}: its weights take {in_bytes(weight_bytes)}, and of {in_bytes(budget.limit)} only "
            f"{in_bytes(budget.usable)} may be used."
        )
