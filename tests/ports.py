"""Loopback ports that nobody else is given: each process that runs tests has a range of its own.

A port from the kernel was free a moment ago, and a moment later it may be another server's, or one end of
any connection. Ours lie below those that Linux (from 32768) and macOS (from 49152) give to connections, and
whoever listens at the first port of a range has the others of it: no two processes of tests, whether of this
run or of another, share one.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator

FIRST, LAST = 20_000, 32_000
RANGE_PORTS = 200
"""More than a process has in use at once, so that a port rests before it comes again."""


def free_port() -> int:
    """A loopback port without a listener. Raises `AssertionError` when there is none."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """So many in a row. Raises `AssertionError` when there are none."""
    found: list[int] = []
    for port in itertools.islice(_ours, 2 * RANGE_PORTS):
        found = [*found, port] if not found or port == found[-1] + 1 else [port]
        if not _is_free(port):
            found = []
        elif len(found) == count:
            return found
    raise AssertionError("every port of this process is taken")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers bind
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _own_ports() -> Iterator[int]:
    """Round and round in a range that is ours until this process ends."""
    for first in range(FIRST, LAST, RANGE_PORTS):
        with socket.socket() as guard:
            try:
                guard.bind(("127.0.0.1", first))
                guard.listen()
            except OSError:
                continue
            yield from itertools.cycle(range(first + 1, first + RANGE_PORTS))
    raise AssertionError("every range of ports is taken")


_ours = _own_ports()
