"""Peer-loss monitor: a thread that watches connections and ends this process when another rank is lost.

A rank whose peer is lost waits for ever in a collective operation, and its model thread cannot detect it.
So this thread ends the whole process at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

_LOOK_S = 0.5
_CLOSE_S_MAX = 5.0

FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


class PeerMonitor:
    """Peer-loss monitor. Calls `lost` with a reason, once, on its own thread."""

    def __init__(self, monitor: zmq.Socket[bytes], lost: Callable[[str], None]) -> None:
        self._monitor = monitor
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
        strays = 0
        """Failed handshakes whose disconnection is still to come; these are not ranks."""
        while not self._over.is_set():
            at, what = self._limit
            if time.monotonic() >= at:  # checked first, as failed handshakes may never cease
                return f"{what} takes too long"
            if not self._monitor.poll(int(1000 * _LOOK_S)):
                continue
            event = recv_monitor_message(self._monitor)["event"]
            if event in FAILED_HANDSHAKES:
                strays += 1
            elif event == zmq.EVENT_DISCONNECTED and strays:
                strays -= 1
            elif event == zmq.EVENT_DISCONNECTED:
                return "the connection to a rank is lost"
        return ""
