"""The gateway's end of the line to its supervisor (`protocol.orderline`), on the event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, MutableMapping

from protocol.orderline import VARIABLE, Inlet, Outlet
from protocol.orders import Orders, Roster

log = logging.getLogger(__name__)

_READ_BYTES = 65_536


class Foreman:
    """Who starts and ends workers for us: hears what is wanted, tells how the models stand."""

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(False)
        self._line = line
        self._outlet = Outlet(line)
        self._inlet = Inlet(Roster)
        self._on_roster: Callable[[Roster], None] | None = None

    @classmethod
    def find(cls, environ: MutableMapping[str, str]) -> Foreman | None:
        """None: there is no supervisor. Takes what tells of the line out of `environ`."""
        if not (number := environ.pop(VARIABLE, "")).isdigit():
            return None
        line = socket.socket(fileno=int(number))
        line.set_inheritable(False)
        return cls(line)

    def start(self, on_roster: Callable[[Roster], None]) -> None:
        """From here on `on_roster` is called with each that comes, at once if one has."""
        self._on_roster = on_roster
        asyncio.get_running_loop().add_reader(self._line, self._read)
        self._read()

    def tell(self, orders: Orders) -> None:
        """What is to be done; what was said before is not said again."""
        self._outlet.say(orders)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._line)
        self._line.close()

    def _read(self) -> None:
        try:
            data = self._line.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the supervisor is gone: whoever starts us has us follow it
            asyncio.get_running_loop().remove_reader(self._line)
            return
        try:
            roster = self._inlet.feed(data)
        except ValueError as error:
            log.error("the supervisor says what makes no sense: %s", error)
            return
        if roster is not None and self._on_roster is not None:
            self._on_roster(roster)
