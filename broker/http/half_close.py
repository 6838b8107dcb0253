"""Half-closed connections: the client has closed its side, and still reads its responses, or it has left.

TCP announces both alike, with the end of the client's data. A write tells them apart: the machine of a client
that has left answers it with a reset. So one byte of the response is written ahead: the first byte of its
status line, or a leading zero of the size of its next chunk, which is allowed (RFC 9112, section 7.1). A
client that still reads gets the same response. A body without chunks has no such byte, but every further
write of it has the same effect.

A transport that does not read does not report a reset, so the socket is asked for its error.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

POLL_S_MIN = 0.005
POLL_S_MAX = 1.0
"""Polls start soon, because the reset of a client that has left comes after one round trip, and then become
rarer."""
_STATUS_LINE = b"H"
_CHUNK_SIZE = b"0"


class HalfClose:
    """Watch over the client of a half-closed connection: aborts the transport when the client has left."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._poll_s = POLL_S_MIN
        self._timer: asyncio.TimerHandle | None = None

    def start(self, cycle: RequestResponseCycle) -> None:
        """Write the probe into the response of `cycle`, the request that is being answered, and poll."""
        if not cycle.response_started:
            self._transport.write(_STATUS_LINE)
            cycle.transport = cast(asyncio.Transport, _StartedTransport(cycle, self._transport))
        elif cycle.chunked_encoding:
            self._transport.write(_CHUNK_SIZE)
        self._poll()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _poll(self) -> None:
        if self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        self._timer = self._loop.call_later(self._poll_s, self._poll)
        self._poll_s = min(2 * self._poll_s, POLL_S_MAX)


class _StartedTransport:
    """Transport of a response whose first byte has been written, with what uvicorn's cycle uses."""

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
        self._cycle = cycle
        self._transport = transport

    def write(self, data: bytes) -> None:
        assert data.startswith(_STATUS_LINE)
        self._cycle.transport = self._transport
        self._transport.write(data[len(_STATUS_LINE) :])

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()
