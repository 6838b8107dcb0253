"""Rank and size from environment variables, set by `mlx.launch` or by our leader.

MLX_RANK, with MLX_HOSTFILE (ring) or MLX_IBV_DEVICES and MLX_JACCL_COORDINATOR (jaccl), are upstream's.
ROUNDHOUSE_RANKS is the leader's RPC endpoint. Without it, it is derived from the others, so that ranks
started by hand find each other: on one machine it is a socket in the runtime directory.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protocol.common.state_folder import server_name
from protocol.hosts import Backend, HostsError, is_loopback
from protocol.sockets import Curve, EndpointError, runtime_directory

RANK, RING, DEVICES, COORDINATOR = "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"
LINE = "ROUNDHOUSE_RANKS"
FIRST = "ROUNDHOUSE_FIRST_RANK"
"""The process id of the leader, if it started this process on its own machine."""
LINE_OFFSET = 1000
"""Distance of the derived RPC port, of ranks on several machines, from the leader's port in the backend."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Rank and number of ranks. `endpoint`: where the leader binds and the followers connect."""

    rank: int
    size: int
    backend: Backend
    endpoint: str


def find(environ: Mapping[str, str]) -> RankInfo | None:
    """Return this process's rank; None if there is only one process. Raises `HostsError` for invalid
    variables."""
    number = environ.get(RANK, "")
    if not number.isdigit():
        return None
    backend: Backend = "jaccl" if COORDINATOR in environ else "ring"
    try:
        size, first = _jaccl(environ) if backend == "jaccl" else _ring(environ)
        if size < 2:
            return None
        host, port = first.rsplit(":", 1)
        endpoint = environ.get(LINE) or _endpoint(host, int(port))
    except EndpointError as error:
        raise HostsError(str(error)) from None
    except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
        raise HostsError(
            f"{RANK} is set, but the related variables are not as mlx.launch sets them: {error!r}"
        ) from None
    if int(number) >= size:
        raise HostsError(f"{RANK} is {number}, but there are only {size} ranks")
    return RankInfo(int(number), size, backend, endpoint)


def _endpoint(host: str, port: int) -> str:
    """Return the leader's RPC endpoint. Raises `EndpointError`."""
    if is_loopback(host):
        return f"ipc://{runtime_directory()}/ranks-{server_name(host, port)}.sock"
    return f"tcp://{host}:{port + LINE_OFFSET}"


def _ring(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of ranks and an address of the leader."""
    content = Path(environ[RING]).read_text(encoding="utf-8").strip()
    if not content:
        return 1, ""
    rows = json.loads(content)
    return len(rows), str(rows[0][0])


def _jaccl(environ: Mapping[str, str]) -> tuple[int, str]:
    return len(json.loads(Path(environ[DEVICES]).read_text(encoding="utf-8"))), environ[COORDINATOR]


KEYS = "ROUNDHOUSE_RANK_KEYS"
"""Environment variable that tells a follower to read its keys from stdin; its value is `stdin`."""
KEYS_BYTES_MAX = 1024
"""Limit of the line with the keys, which is also that of a terminal's line on macOS."""


def encode_keys(keys: Curve) -> bytes:
    """Return a follower's keys as one line."""
    fields = keys.gateway_public, keys.worker_public, keys.secret
    return msgspec.json.encode([each.decode() for each in fields]) + b"\n"


def read_keys(fd: int, wait_s: float) -> Curve:
    """Read the line with this follower's keys within `wait_s` seconds. Raises `EndpointError`."""
    until, line = time.monotonic() + wait_s, b""
    while not line.endswith(b"\n"):
        left_s = max(0.0, until - time.monotonic())
        if not select.select([fd], [], [], left_s)[0]:
            raise EndpointError(f"rank 0 has sent no keys within {wait_s:g} s")
        if not (more := os.read(fd, KEYS_BYTES_MAX)) or len(line) > KEYS_BYTES_MAX:
            raise EndpointError("rank 0 has sent no keys")
        line += more
    try:
        public, own, secret = msgspec.json.decode(line, type=tuple[str, str, str])
    except msgspec.MsgspecError:
        raise EndpointError("rank 0 has sent no keys") from None
    return Curve(public.encode(), own.encode(), secret.encode())
