"""Process-wide MLX settings."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.models.memory import MemoryBudget

log = logging.getLogger(__name__)


def prepare_device(budget: MemoryBudget) -> None:
    """Apply memory limits and check the compiler. Call before the first array is created."""
    import mlx.core as mx

    from worker.models import memory

    memory.apply(budget)
    if mx.default_device() == mx.cpu:
        ensure_compiler()


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
