"""Preloads OpenBLAS on Linux CPUs, if it is installed.

MLX's CPU wheel contains the reference BLAS; any OpenBLAS multiplies float32 matrices twenty times as fast.
The dynamic linker loads it only at process start, so the process re-executes itself once with `LD_PRELOAD`.
OpenBLAS is optional; whether it was found is logged.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import logging
import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

from protocol.common.cuda_build import cuda_package

log = logging.getLogger(__name__)

SWITCH = "ROUNDHOUSE_OPENBLAS"
"""Environment variable; `off` disables the preload."""
GUARD = "ROUNDHOUSE_OPENBLAS_PRELOADED"
"""Set to the preloaded library in the new process; a process with it does not re-execute itself."""

_PATTERNS = (
    "/usr/lib/*/openblas-pthread/libopenblas*.so*",  # Debian, Ubuntu
    "/usr/lib64/libopenblasp*.so*",  # Fedora: p for threads, o for OpenMP, none for serial
    "/usr/lib*/libopenblas*.so*",
    "/usr/lib/*/libopenblas*.so*",
    "/usr/local/lib/libopenblas*.so*",
    "/opt/OpenBLAS/lib/libopenblas*.so*",
)


def preload_openblas(argv: Sequence[str]) -> None:
    """Re-execute this process with OpenBLAS preloaded; return if there is nothing to do.

    `argv`: `sys.argv`. Call it before threads are started and before MLX is imported. The process keeps its
    id, working directory and inheritable files.
    """
    if not _is_wanted(os.environ):
        return
    if (loaded := os.environ.get(GUARD)) is not None:
        _restore(os.environ)
        log.info("OpenBLAS preloaded: found %s", loaded)
        return
    library = find_openblas()
    if library is None:
        log.info("OpenBLAS not found, so prefill is slower; try apt install libopenblas0-pthread")
        return
    _replace(library, argv)


@functools.cache
def find_openblas() -> Path | None:
    """Return the first OpenBLAS that exports the functions MLX calls."""
    return next((library for library in _candidates() if _is_usable(library)), None)


def _is_wanted(environ: MutableMapping[str, str]) -> bool:
    return sys.platform == "linux" and environ.get(SWITCH, "").lower() != "off" and not cuda_package()


def _candidates() -> Iterator[Path]:
    for pattern in _PATTERNS:
        yield from sorted(Path("/").glob(pattern.removeprefix("/")))
    # Runs ldconfig, and a compiler if there is one: slow, so last.
    if (name := ctypes.util.find_library("openblas")) is not None:
        yield Path(name)


def _is_usable(library: Path) -> bool:
    # "64": built for 64-bit indices. numpy's and scipy's bundled copies rename the functions.
    if "64" in library.name:
        return False
    try:
        return hasattr(ctypes.CDLL(str(library)), "cblas_sgemm")
    except OSError:
        return False


def _replace(library: Path, argv: Sequence[str]) -> None:
    environ = dict(os.environ)
    before = environ.get("LD_PRELOAD")
    environ["LD_PRELOAD"] = f"{library}:{before}" if before else str(library)
    environ[GUARD] = str(library)
    interpreter = sys.orig_argv[1 : len(sys.orig_argv) - len(argv) + 1]  # `-X dev -m worker` and the like
    try:
        os.execve(sys.executable, [sys.executable, *interpreter, *argv[1:]], environ)
    except OSError as error:
        log.warning("cannot re-execute this process with %s: %s", library, error)


def _restore(environ: MutableMapping[str, str]) -> None:
    """Remove the library from the environment of children, such as a compiler started by MLX."""
    library, _, others = environ.get("LD_PRELOAD", "").partition(":")
    if library != environ[GUARD]:
        return
    if others:
        environ["LD_PRELOAD"] = others
    else:
        environ.pop("LD_PRELOAD", None)
