"""Hostfiles: the machines that run one model together, as `mlx.distributed_config` writes them.

A list of hosts, or an object with it under `hosts`, and with `backend` and `envs` where somebody knows these.
The first host has rank 0. Read by the worker that is told of it, and by who looks at it beforehand.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

Backend = Literal["ring", "jaccl"]
Mode = Literal["tensor", "pipeline"]
"""What of a model each rank has: a part of each layer, or some of the layers."""

HOSTS_MAX = 64


class HostsError(ValueError):
    """A hostfile that cannot be used, in a sentence."""


class Host(msgspec.Struct, frozen=True):
    """`ssh`: how it is reached. `ips`: where its part of the ring listens. `rdma`: its devices towards each
    of the hosts, None towards itself. `python`: its interpreter, if that is at another place than here."""

    ssh: str
    ips: list[str] = []
    rdma: list[str | list[str] | None] = []
    python: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine: then its processes are started without ssh."""
        return is_loopback(self.ssh)


class Hosts(msgspec.Struct, frozen=True):
    """All of them. `envs`: NAME=value, for each of their processes."""

    hosts: list[Host]
    backend: Backend | None = None
    envs: list[str] = []

    def ring(self, port: int) -> list[list[str]]:
        """Where each rank listens, as MLX_HOSTFILE has it: ports are counted up from `port`."""
        rows: list[list[str]] = []
        for host in self.hosts:
            rows.append([f"{ip}:{port + index}" for index, ip in enumerate(host.ips)])
            port += len(host.ips)
        return rows

    def devices(self) -> list[Sequence[str | list[str] | None]]:
        """The RDMA devices, as MLX_IBV_DEVICES has them."""
        return [host.rdma for host in self.hosts]


def is_loopback(host: str) -> bool:
    """Can only this machine reach what listens there? False for every name but `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read(path: Path) -> Hosts:
    """Raises `HostsError`."""
    try:
        content = msgspec.json.decode(path.read_bytes())
        given = msgspec.convert({"hosts": content} if isinstance(content, list) else content, Hosts)
    except (OSError, ValueError) as error:
        raise HostsError(f"{path}: {error}") from None
    if not 2 <= len(given.hosts) <= HOSTS_MAX:
        raise HostsError(f"{path}: names {len(given.hosts)} hosts; there must be 2 to {HOSTS_MAX}")
    return given


def wrong_with(given: Hosts, backend: Backend) -> str | None:
    """Why a backend cannot be used with these hosts; None: nothing is wrong."""
    without = [host.ssh for host in given.hosts if not host.ips]
    if backend == "ring":
        return f"no `ips` of {', '.join(without)}, which a ring needs" if without else None
    if not given.hosts[0].ips:
        return f"no `ips` of {given.hosts[0].ssh}, where the others meet"
    for rank, host in enumerate(given.hosts):
        if len(host.rdma) != len(given.hosts):
            return f"`rdma` of {host.ssh} names {len(host.rdma)} devices for {len(given.hosts)} hosts"
        missing = [g.ssh for other, g in enumerate(given.hosts) if other != rank and not host.rdma[other]]
        if missing:
            return f"`rdma` of {host.ssh} names no device towards {', '.join(missing)}"
    return None
