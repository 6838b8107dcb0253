"""Unique loopback ports for tests: each test process reserves a range of its own, below the ephemeral ports.

The process that listens at the first port of a range owns the rest of it."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator

FIRST, LAST = 20_000, 32_000
RANGE_PORTS = 200
"""More than a process uses at once, so that a port is not reused immediately."""


def free_port() -> int:
    """Return a loopback port without a listener. Raises `AssertionError` if there is none."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return `count` consecutive free ports. Raises `AssertionError` if there are none."""
    found: list[int] = []
    for port in itertools.islice(_ours, 2 * RANGE_PORTS):
        found = [*found, port] if not found or port == found[-1] + 1 else [port]
        if not _is_free(port):
            found = []
        elif len(found) == count:
            return found
    raise AssertionError("all ports of this process are in use")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers bind
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _own_ports() -> Iterator[int]:
    """Cycle through the ports of a range that this process owns until it ends."""
    for first in range(FIRST, LAST, RANGE_PORTS):
        with socket.socket() as guard:
            try:
                guard.bind(("127.0.0.1", first))
                guard.listen()
            except OSError:
                continue
            yield from itertools.cycle(range(first + 1, first + RANGE_PORTS))
    raise AssertionError("all port ranges are in use")


_ours = _own_ports()
