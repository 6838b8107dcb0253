"""Which rank this process is: what `mlx.launch` tells it by variables, and what the first rank adds.

MLX_RANK, with MLX_HOSTFILE (ring) or MLX_IBV_DEVICES and MLX_JACCL_COORDINATOR (jaccl), are upstream's.
ROUNDHOUSE_RANKS is where the first rank calls from; without it that follows from the others, so that ranks
started by hand find each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protocol.hosts import Backend, HostsError

RANK, RING, DEVICES, COORDINATOR = "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"
LINE = "ROUNDHOUSE_RANKS"
FIRST = "ROUNDHOUSE_FIRST_RANK"
"""The process id of the first rank, where it has started this one on its own machine."""
LINE_OFFSET = 1000
"""How far the line's port is beyond the first rank's own."""


@dataclass(frozen=True, slots=True)
class Place:
    """`rank` of `size`. `endpoint`: where the first rank binds and the others connect."""

    rank: int
    size: int
    backend: Backend
    endpoint: str


def find(environ: Mapping[str, str]) -> Place | None:
    """None: this process is no rank, or the only one. Raises `HostsError` for variables without sense."""
    number = environ.get(RANK, "")
    if not number.isdigit():
        return None
    backend: Backend = "jaccl" if COORDINATOR in environ else "ring"
    try:
        size, first = _jaccl(environ) if backend == "jaccl" else _ring(environ)
        if size < 2:
            return None
        host, port = first.rsplit(":", 1)
        endpoint = environ.get(LINE) or f"tcp://{host}:{int(port) + LINE_OFFSET}"
    except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
        raise HostsError(
            f"{RANK} is set, and what goes with it is not as mlx.launch sets it: {error!r}"
        ) from None
    if int(number) >= size:
        raise HostsError(f"{RANK} is {number}, and there are {size} ranks")
    return Place(int(number), size, backend, endpoint)


def _ring(environ: Mapping[str, str]) -> tuple[int, str]:
    """How many ranks there are, and an address of the first."""
    content = Path(environ[RING]).read_text().strip()
    if not content:
        return 1, ""
    rows = json.loads(content)
    return len(rows), str(rows[0][0])


def _jaccl(environ: Mapping[str, str]) -> tuple[int, str]:
    return len(json.loads(Path(environ[DEVICES]).read_text())), environ[COORDINATOR]
