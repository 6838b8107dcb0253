"""What a supervisor and the gateway under it say to each other: lines of JSON, down a pair of sockets.

The supervisor tells which models there are and how they stand (`Roster`), the gateway which of them are to
run and what it sees of their workers (`Orders`). Each line says all there is to say and takes the place of
those before it: one that is skipped is no loss, and a gateway that is started anew need not know what was.
The gateway finds the number of its end in ROUNDHOUSE_SUPERVISOR_FD.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

VARIABLE = "ROUNDHOUSE_SUPERVISOR_FD"
LINE_BYTES_MAX = 2**20

Stage = Literal["parked", "running", "ending", "failed"]
"""Of a model's processes: none; one runs, loads, or is about to be started again; one is told to end; none,
and the next is not started for a while, since the last ones could not be kept alive."""


class ModelState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that is configured, and its processes.

    `weight_bytes`: the size of its weight files; None: they are not on this machine. `memory_bytes`: what its
    processes hold. `leaving`: those, by id, that end as soon as their requests have, and take no more.
    """

    name: str
    stage: Stage = "parked"
    aliases: list[str] = []
    resident: bool = False
    weight_bytes: int | None = None
    memory_bytes: int = 0
    leaving: list[int] = []


class Roster(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From the supervisor. `on_demand`: models run as `Orders.wanted` says, else all of them do."""

    models: list[ModelState]
    on_demand: bool = False
    memory_budget: int | None = None


class Orders(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From the gateway. `wanted`: the models that are to run, by name; None: as they do. `serving`: workers
    that are ready, by process id. `spare`: those of `leaving` that have nothing left to do."""

    wanted: list[str] | None = None
    serving: list[int] = []
    spare: list[int] = []


Said = TypeVar("Said", Roster, Orders)


class Outlet:
    """The sending end. Never waits: who does not read gets the newest line when he reads again."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rest = b""
        self._next = b""
        self._said: Roster | Orders | None = None

    def say(self, message: Roster | Orders) -> None:
        """Send it, unless it is what was said last."""
        if message != self._said:
            self._said = message
            self._next = msgspec.json.encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Go on with what could not be sent at once."""
        # Where nobody is left at the other end, its end of file says so.
        with contextlib.suppress(BlockingIOError, OSError):
            while self._rest or self._next:
                if not self._rest:
                    self._rest, self._next = self._next, b""
                sent = self._line.send(self._rest, socket.MSG_DONTWAIT)
                self._rest = self._rest[sent:]


class Inlet(Generic[Said]):
    """The receiving end: bytes go in, the newest whole message comes out."""

    def __init__(self, kind: type[Said]) -> None:
        self._decoder: msgspec.json.Decoder[Said] = msgspec.json.Decoder(kind)
        self._rest = b""

    def feed(self, data: bytes) -> Said | None:
        """None: no whole line has come. Raises `ValueError` for one that is no such message."""
        *lines, self._rest = (self._rest + data).rsplit(b"\n", 1)
        if len(self._rest) > LINE_BYTES_MAX:
            raise ValueError("a line is too long")
        return self._decoder.decode(lines[0].rpartition(b"\n")[2]) if lines else None
