"""Our server and upstream's two, each as its user starts it, on one model folder and under one BLAS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.processes import free_port, running, socket_folder, wait_for
from worker.preload import find_openblas

NAMES = ("roundhouse", "mlx_lm.server", "mlx_vlm.server")


@dataclass(frozen=True)
class Server:
    """A server that is up. `fields`: what a chat request to it says besides the usual."""

    name: str
    url: str
    process: psutil.Process
    fields: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def servers(
    folder: Path, rows_max: int, names: Sequence[str] = NAMES, *, reuse: bool = False
) -> Iterator[list[Server]]:
    """Those named, all up at once; idle ones wait on a queue. What they keep on disk goes when they go.

    `reuse`: prefix caches that have to be switched on are.
    """
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_server(name, folder, rows_max, reuse)) for name in names]


@contextlib.contextmanager
def _server(name: str, folder: Path, rows_max: int, reuse: bool) -> Iterator[Server]:
    port, rows = free_port(), str(rows_max)
    url = f"http://127.0.0.1:{port}"
    where = ["--model", str(folder), "--port", str(port)]
    fields: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(socket_folder())
        match name:
            case "roundhouse":
                flags = ["--endpoint", f"ipc://{own}/line", "--max-running", rows, "--log-level", "warning"]
                # Its own each time: every run sends the same prompts, and must find none of the last run's.
                flags += ["--prefix-cache-dir", str(own / "prefixes")]
                server = running("deploy", ["serve", *where, *flags])
                ready, fields = "/ready", {"ignore_eos": True}
            case "mlx_lm.server":
                server = running(name, [*where, "--decode-concurrency", rows], _blas(), silent=True)
                ready = "/health"
            case "mlx_vlm.server":
                flags = ["--host", "127.0.0.1", "--max-num-seqs", rows]
                cache = {"APC_ENABLED": "1", "APC_DISK_PATH": str(own / "prefixes")} if reuse else {}
                server = running(name, [*where, *flags], _blas() | cache, silent=True)
                ready, fields = "/health", {"model": str(folder)}
            case _:
                raise ValueError(f"no server is called {name!r}; there are {', '.join(NAMES)}")
        process = stack.enter_context(server)
        wait_for(url + ready, process)
        yield Server(name, url, process, fields)


def _blas() -> dict[str, str]:
    """What our worker does for itself: float32 products by OpenBLAS, where there is one."""
    library = find_openblas()
    return {"LD_PRELOAD": str(library)} if library else {}
