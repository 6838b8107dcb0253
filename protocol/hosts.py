"""Hostfiles: the machines that run one model together, as `mlx.distributed_config` writes them.

A list of hosts, or an object with that list under `hosts` and optionally `backend` and `envs`. The first host
has rank 0. Read by the worker, and by preflight checks.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from protocol.common.text_files import without_mark

Backend = Literal["ring", "jaccl"]
Mode = Literal["tensor", "pipeline"]
"""How a model is sharded: each rank has a part of each layer (tensor) or some of the layers (pipeline)."""

HOSTS_MAX = 64


class HostsError(ValueError):
    """An invalid hostfile; the message is a sentence."""


class Host(msgspec.Struct, frozen=True):
    """One machine. `ssh`: its ssh name. `ips`: addresses on which its ring sockets listen. `rdma`: its RDMA
    device for each host, None for itself. `python`: its interpreter, if its path differs from ours."""

    ssh: str
    ips: list[str] = []
    rdma: list[str | list[str] | None] = []
    python: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, whose processes are started without ssh."""
        return is_loopback(self.ssh)


class Hosts(msgspec.Struct, frozen=True):
    """A hostfile. `envs`: environment variables (NAME=value) of every rank's process."""

    hosts: list[Host]
    backend: Backend | None = None
    envs: list[str] = []

    def ring(self, port: int) -> list[list[str]]:
        """Return each rank's listening addresses, as in MLX_HOSTFILE; ports count up from `port`."""
        rows: list[list[str]] = []
        for host in self.hosts:
            rows.append([f"{ip}:{port + index}" for index, ip in enumerate(host.ips)])
            port += len(host.ips)
        return rows

    def devices(self) -> list[Sequence[str | list[str] | None]]:
        """Return the RDMA devices, as in MLX_IBV_DEVICES."""
        return [host.rdma for host in self.hosts]


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`. False for every name but `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read(path: Path) -> Hosts:
    """Read a hostfile. Raises `HostsError`."""
    try:
        content = msgspec.json.decode(without_mark(path.read_bytes()))
        given = msgspec.convert({"hosts": content} if isinstance(content, list) else content, Hosts)
    except (OSError, ValueError) as error:
        raise HostsError(f"{path}: {error}") from None
    if not 2 <= len(given.hosts) <= HOSTS_MAX:
        raise HostsError(f"{path}: lists {len(given.hosts)} hosts; 2 to {HOSTS_MAX} are required")
    return given


def problem_with(given: Hosts, backend: Backend) -> str | None:
    """Return why `backend` cannot be used with these hosts, or None if it can."""
    without = [host.ssh for host in given.hosts if not host.ips]
    if backend == "ring":
        return f"`ips` is missing for {', '.join(without)}; the ring backend requires it" if without else None
    if not given.hosts[0].ips:
        return f"`ips` is missing for {given.hosts[0].ssh}, to which the other ranks connect"
    for rank, host in enumerate(given.hosts):
        if len(host.rdma) != len(given.hosts):
            return f"`rdma` of {host.ssh} lists {len(host.rdma)} devices for {len(given.hosts)} hosts"
        missing = [g.ssh for other, g in enumerate(given.hosts) if other != rank and not host.rdma[other]]
        if missing:
            return f"`rdma` of {host.ssh} has no device for {', '.join(missing)}"
    return None
