"""Machine and versions of a run."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.rivals import FOREIGN
from bench.versus.results import Run
from worker.process.preload import find_openblas

_CPUINFO = Path("/proc/cpuinfo")
_PACKAGES = {
    "roundhouse": ("mlx-roundhouse", "mlx"),
    "mlx_lm.server": ("mlx-lm",),
    "mlx_vlm.server": ("mlx-vlm",),
}


def run(names: Sequence[str], rounds: int, began: datetime.datetime, load_before: float) -> Run:
    """Return the facts of a run that ends now."""
    library = find_openblas()
    return Run(
        began=began.strftime("%Y-%m-%d %H:%M UTC"),
        cores=cores(),
        processor=_processor(),
        blas=library.name if library else "MLX's own BLAS",
        load=[round(load_before, 1), round(os.getloadavg()[0], 1)],
        rounds=rounds,
        versions={"python": platform.python_version(), **_versions(names)},
    )


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _processor() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        for package in _PACKAGES.get(name, ()):
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                continue
        if name in FOREIGN:
            found[name] = FOREIGN[name].packages[0].partition("==")[2]
    return found
