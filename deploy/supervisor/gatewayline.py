"""The supervisor's end of the line to a gateway process (`protocol.orderline`): each process has its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from protocol.orderline import Inlet, Outlet
from protocol.orders import Orders, Roster

log = logging.getLogger(__name__)

_READ_BYTES = 65_536
_CLOSE_S_MAX = 5.0


class GatewayLine:
    """`on_orders` is called on a thread of its own, until the gateway has gone or the line is closed."""

    def __init__(self, on_orders: Callable[[Orders], None]) -> None:
        self._line, self.theirs = socket.socketpair()
        """`theirs`: the end that the gateway inherits; to be closed here once it has."""
        self._outlet = Outlet(self._line)
        self._on_orders = on_orders
        self._thread = threading.Thread(target=self._hear, name="orders", daemon=True)
        self._thread.start()

    def tell(self, roster: Roster) -> None:
        """How the models stand; what was said before is not said again."""
        self._outlet.say(roster)

    def close(self) -> None:
        self.theirs.close()
        with contextlib.suppress(OSError):  # macOS: the other end has gone
            self._line.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CLOSE_S_MAX)
        self._line.close()

    def _hear(self) -> None:
        inlet = Inlet(Orders)
        while data := self._receive():
            try:
                orders = inlet.feed(data)
            except ValueError as error:
                log.error("the gateway says what makes no sense: %s", error)
                return
            if orders is not None:
                self._on_orders(orders)

    def _receive(self) -> bytes:
        try:
            return self._line.recv(_READ_BYTES)
        except OSError:
            return b""
