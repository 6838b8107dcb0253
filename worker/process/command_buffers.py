"""Limits of Metal's command buffers, set before MLX creates its device.

MLX commits a command buffer after 40 to 50 operations, or as many MB of distinct inputs. A decode step of a
mixture of experts or a hybrid model has thousands of operations, so up to a tenth of it is spent between
buffers. With larger ones the output is the same bit for bit (mlx 4521: M3 Ultra, 5 to 8% faster; mlxcel 360:
M1 Ultra, 11 to 13%). From M5 on, larger buffers are not faster, so MLX's limits stay. Untried here.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import MutableMapping

OPERATIONS, MEGABYTES = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
LIMITS = {OPERATIONS: "1000", MEGABYTES: "400"}
"""More does not help; 2,000 MB let a long prefill hold 18 times the memory (vllm-metal 585)."""
_GENERATION = re.compile(r"Apple M([1-4])\b")


def raise_limits(environ: MutableMapping[str, str], chip: str | None = None) -> None:
    """Set the limits where they help, unless the user has set them. `chip`: default, this machine's."""
    chip = _chip() if chip is None else chip
    if _GENERATION.match(chip):
        for name, value in LIMITS.items():
            environ.setdefault(name, value)


def _chip() -> str:
    """Return the name of the chip, such as "Apple M3 Ultra"; empty where there is no Metal."""
    if platform.system() != "Darwin":
        return ""
    name = ctypes.create_string_buffer(128)
    size = ctypes.c_size_t(len(name))
    failed = ctypes.CDLL(None).sysctlbyname(b"machdep.cpu.brand_string", name, ctypes.byref(size), None, 0)
    return "" if failed else name.value.decode(errors="replace")
