"""Peer-loss monitor: a thread that watches connections and ends this process when another rank is lost.

A rank whose peer is lost waits for ever in a collective operation, and its model thread cannot detect it.
So this thread ends the whole process at once. Only connections of ranks count: a stranger may connect, fail
the handshake in any way, and leave.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

_LOOK_S = 0.5
_CLOSE_S_MAX = 5.0


class Connections(Protocol):
    """Connections of one socket, as told by the events of its monitor. `is_lost`: one to a rank is."""

    is_lost: bool

    def on_event(self, event: int, fd: int) -> None: ...


class FollowerConnections:
    """The leader's connections, by file descriptor: those of followers, and strangers'. Pure.

    A descriptor is reused once it is closed, and events of strangers may be read late. What they have left
    behind is known when a follower is admitted, because its own connection was accepted after them.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self._closed: set[int] = set()
        self._followers: set[int] = set()

    def on_event(self, event: int, fd: int) -> None:
        """Handle an event, in the order in which they occurred."""
        if event == zmq.EVENT_ACCEPTED:
            self._closed.discard(fd)
        elif event == zmq.EVENT_DISCONNECTED:
            self._closed.add(fd)
            self.is_lost |= fd in self._followers

    def admit(self, fd: int) -> None:
        """Count this connection as a follower's. All earlier events must have been handled."""
        self._followers.add(fd)
        self.is_lost |= fd in self._closed


class LeaderConnection:
    """A follower's connection to the leader: lost when it was established and is gone. Pure."""

    def __init__(self) -> None:
        self.is_lost = False
        self._is_open = False

    def on_event(self, event: int, fd: int) -> None:
        """Handle an event, in the order in which they occurred."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_open = True
        elif event == zmq.EVENT_DISCONNECTED:
            self.is_lost |= self._is_open


def drain(monitor: zmq.Socket[bytes], connections: Connections) -> None:
    """Handle the events that have occurred so far."""
    while monitor.poll(0):
        pass_event(monitor, connections)


def pass_event(monitor: zmq.Socket[bytes], connections: Connections) -> None:
    """Receive one event and handle it."""
    told = recv_monitor_message(monitor)
    connections.on_event(told["event"], told["value"])


class PeerMonitor:
    """Peer-loss monitor. Calls `lost` with a reason, once, on its own thread."""

    def __init__(
        self, monitor: zmq.Socket[bytes], connections: Connections, lost: Callable[[str], None]
    ) -> None:
        self._monitor = monitor
        self._connections = connections
        self._lost = lost
        self._limit: tuple[float, str] = math.inf, ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self) -> None:
        """Start to watch; events since the socket's creation count too."""
        self._thread.start()

    def allow(self, seconds: float, what: str) -> None:
        """Set a time limit from now for the phase `what`, replacing the last one. From any thread."""
        self._limit = time.monotonic() + seconds, what

    def close(self) -> None:
        """End the thread; waits at most `_CLOSE_S_MAX` seconds if it is in `lost`."""
        self._over.set()
        self._thread.join(_CLOSE_S_MAX)

    def _run(self) -> None:
        if reason := self._reason():
            self._lost(reason)

    def _reason(self) -> str:
        """Watch until a rank is lost and return the reason; empty if closed."""
        while not self._over.is_set():
            at, what = self._limit
            if time.monotonic() >= at:  # checked first, as strangers' events may never cease
                return f"{what} takes too long"
            if self._connections.is_lost:
                return "the connection to a rank is lost"
            if self._monitor.poll(int(1000 * _LOOK_S)):
                pass_event(self._monitor, self._connections)
        return ""
