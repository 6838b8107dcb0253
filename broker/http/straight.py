"""A short cut for the middle of an answer: from an open stream's renderer straight to the connection.

Every `send` of ASGI passes through each middleware and through uvicorn, and only a task can await it. That is
right for the beginning and the end of an answer. What comes in between is bytes for a connection that takes
them, some hundred times a second for each stream: the task sleeps on. The connection leaves its short cut in
the request's extensions; where there is none, or the client is behind, everything is sent as ASGI has it.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "roundhouse.straight"


@dataclass(frozen=True, slots=True)
class Straight:
    """The short cut of one request."""

    _cycle: RequestResponseCycle

    @property
    def is_open(self) -> bool:
        """Whether a part of a body can be written now: of one that has begun, has not ended, and has no
        announced length; to a client that is there and reads."""
        cycle = self._cycle
        begun = cycle.chunked_encoding and not cycle.response_complete
        return bool(begun) and not cycle.flow.write_paused and not cycle.disconnected

    def write(self, body: bytes) -> None:
        """While it is open. Nothing where there is nothing: an empty chunk is the end."""
        if body:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def offer(cycle: RequestResponseCycle) -> None:
    """Leave the short cut of a request in its scope. A HEAD has none: its answer has no body."""
    if cycle.scope["method"] != "HEAD":
        cycle.scope["extensions"] = {EXTENSION: {"way": Straight(cycle)}}


def find(scope: Scope) -> Straight | None:
    """The short cut of a request, if its connection has one."""
    way: Straight | None = scope.get("extensions", {}).get(EXTENSION, {}).get("way")
    return way
