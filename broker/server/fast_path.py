"""Fast path for streamed responses: from the renderer directly to the transport, bypassing ASGI `send`.

Every ASGI `send` passes through all middlewares and uvicorn, and needs a running task. That is right for the
first and the last message of a response. Those in between are bytes for a writable connection, several
hundred times a second for each stream, so they are written without waking the task. The connection stores its
fast path in the request's extensions. If there is none, or the client reads too slowly, ASGI `send` is used.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "roundhouse.straight"


@dataclass(frozen=True, slots=True)
class FastPath:
    """Fast path of one request."""

    _cycle: RequestResponseCycle

    @property
    def is_open(self) -> bool:
        """Whether body bytes can be written now.

        The response must have started, be unfinished and chunked, and the client must be connected and
        reading.
        """
        cycle = self._cycle
        begun = cycle.chunked_encoding and not cycle.response_complete
        return bool(begun) and not cycle.flow.write_paused and not cycle.disconnected

    def write(self, body: bytes) -> None:
        """Write a chunk; requires `is_open`. Empty bodies are skipped: an empty chunk would end the
        response."""
        if body:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def offer(cycle: RequestResponseCycle) -> None:
    """Store a request's fast path in its scope. HEAD requests get none: their response has no body."""
    if cycle.scope["method"] != "HEAD":
        cycle.scope["extensions"] = {EXTENSION: {"way": FastPath(cycle)}}


def find(scope: Scope) -> FastPath | None:
    """Return the fast path of a request, if its connection has one."""
    way: FastPath | None = scope.get("extensions", {}).get(EXTENSION, {}).get("way")
    return way
