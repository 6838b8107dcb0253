"""Environment of a process for MLX, prepared before it is imported.

Metal's command buffers: MLX commits one after 40 to 50 operations, or as many MB of distinct inputs. A decode
step of a mixture of experts or a hybrid model has thousands of operations, so up to a tenth of it is spent
between buffers. With larger ones the output is the same bit for bit (mlx 4521: M3 Ultra, 5 to 8% faster;
mlxcel 360: M1 Ultra, 11 to 13%). From M5 on, larger buffers are not faster, so MLX's limits stay. Untried
here.

Open files: mlx-lm changes the limit when it is imported, to 2048, with a hard limit of 4096. Only root may
raise a hard limit, so the import fails below 4096. mlx-lm is then imported here, while its change is kept
within the limit of this process.

Compiled kernels, on CPUs: MLX compiles C++ in the folder `mlx` among the temporary files, loads the libraries
that it finds there into the process, and checks neither the owner nor the permissions. So another user of the
machine who makes this folder first would run code as us.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import platform
import re
import resource
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from protocol.common.secure_files import is_protected
from protocol.common.temporary_folder import TemporaryFolder

log = logging.getLogger(__name__)

OPERATIONS, MEGABYTES = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
LIMITS = {OPERATIONS: "1000", MEGABYTES: "400"}
"""More does not help; 2,000 MB let a long prefill hold 18 times the memory (vllm-metal 585)."""
_GENERATION = re.compile(r"Apple M([1-4])\b")
_UPSTREAM = "mlx_lm.utils"
_FILES_WANTED = 4096


def raise_buffer_limits(environ: MutableMapping[str, str], chip: str | None = None) -> None:
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


def import_upstream() -> None:
    """Import mlx-lm if the limit is below what it sets; otherwise do nothing. Call it before any other
    import of mlx-lm."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _FILES_WANTED:
        return
    set_limit = resource.setrlimit

    def within_limit(kind: int, limits: tuple[int, int]) -> None:
        """Set a limit of mlx-lm's, or as much of it as is allowed."""
        soft, wanted = limits
        set_limit(kind, (min(soft, hard), min(wanted, hard)))

    resource.setrlimit = within_limit
    try:
        importlib.import_module(_UPSTREAM)
    finally:
        resource.setrlimit = set_limit


def protect_kernels() -> None:
    """Take the folder of compiled kernels, or if others can write to it, have MLX use another one. Call it
    before MLX computes.

    Other temporary files stay where they are. Raises `OSError`.
    """
    named = os.environ.get("TMPDIR", "")
    if named and not Path(named).is_dir():
        os.environ["TMPDIR"] = tempfile.gettempdir()
        log.warning(
            "TMPDIR: there is no folder %s, so temporary files are in %s", named, tempfile.gettempdir()
        )
    folder = Path(tempfile.gettempdir()) / "mlx"  # Python remembers the folder for temporary files
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_protected(folder):
            return
    except OSError as error:
        log.debug("%s: %s", folder, error)
    other = TemporaryFolder("kernels").path
    os.environ["TMPDIR"] = str(other)
    log.warning("%s is writable by others: MLX compiles kernels in %s, for this process only", folder, other)
