"""Who ends this process when another rank has gone: a thread that hears of connections alone.

A rank whose peer is gone would wait for it in a collective, silently and for ever: nothing that the model's
thread does can find that out. So this one ends the whole process, at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

_LOOK_S = 0.5

FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


class Watch:
    """`lost` is called with a reason, once, on the watch's own thread."""

    def __init__(self, monitor: zmq.Socket[bytes], lost: Callable[[str], None]) -> None:
        self._monitor = monitor
        self._lost = lost
        self._limit: tuple[float, str] = math.inf, ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self) -> None:
        """From now on, for what has happened before as well."""
        self._thread.start()

    def allow(self, seconds: float, what: str) -> None:
        """This may take so long from now on, in place of what was said before. From any thread."""
        self._limit = time.monotonic() + seconds, what

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        if reason := self._reason():
            self._lost(reason)

    def _reason(self) -> str:
        """Why it is over; empty: nobody wants to know any more."""
        strays = 0
        """Connections that never were a rank's: who knocks and is turned away is no loss."""
        while not self._over.is_set():
            if not self._monitor.poll(int(1000 * _LOOK_S)):
                at, what = self._limit
                if time.monotonic() >= at:
                    return f"{what} takes too long"
                continue
            event = recv_monitor_message(self._monitor)["event"]
            if event in FAILED_HANDSHAKES:
                strays += 1
            elif event == zmq.EVENT_DISCONNECTED and strays:
                strays -= 1
            elif event == zmq.EVENT_DISCONNECTED:
                return "a rank is gone"
        return ""
