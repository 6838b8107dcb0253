"""HTTP connections: uvicorn's protocol, with limits on what a client may use before its request is complete.

uvicorn waits forever for a request's head and body, accepts heads of any size, and rejects with plain text.
Here requests have deadlines, the size of heads and the number of connections are limited, and every rejection
is an error object.

One deadline runs from the first byte of a request (for the first one, from the connection) until its head is
complete, a second one until its last byte. They restart while an earlier response on the connection is in
progress, and do not limit the duration of a response. A client that does not read its response is
disconnected after `unread_s_max`, once the socket buffers are full. The same limit holds for the rest of a
response after the connection is closed, because a transport closes only when everything is sent.

Pipelined requests are answered in order; a client that sends more than `PIPELINED_MAX` ahead is disconnected.
Connections beyond the limit are turned away, counted, and logged once a minute. The end of a client's data is
its departure.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import math
import re
import resource
import socket
from dataclasses import dataclass
from typing import Any, cast

import httptools
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from broker.dispatch.traffic import HttpCounters
from broker.middleware.context import new_request_id
from broker.middleware.errors import error_response
from broker.server import fast_path
from protocol.errors import Code, RequestError

log = logging.getLogger(__name__)

HEAD_BYTES_MAX = 64 * 1024
HEADERS_MAX = 100
HEAD_S_MAX = 10.0
"""Shorter than the limit for large bodies, so that connections with unfinished heads are closed soon."""
PIPELINED_MAX = 100
"""Number of requests that wait for the responses to earlier ones on their connection."""
UNSENT_BYTES_MAX = 16 * 1024
"""Number of bytes beyond the client's receive window that the kernel takes, and as many that the transport
takes before it pauses. More would hide a client that does not read: on loopback, Linux takes 2.5 MB."""
TURNED_AWAY_MAX = 64
"""Maximum number of connections beyond the limit that get an error response; further ones are aborted."""
TURN_AWAY_S_MAX = 5.0
TURNED_AWAY_LOG_S = 60.0
"""Minimum interval between two log lines about such connections."""
LINGER_S_MAX = 2.0
LAST_REQUEST_S_MAX = 1.0
"""Time that a connection without a request stays open when the server stops. A request that was on its way is
answered, and its response says that the connection closes."""
DESCRIPTORS_SPARE = 128
"""File descriptors reserved for everything but client connections."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of client connections."""

    connections_max: int
    body_s_max: float
    """Seconds from the end of a request's head to its last byte."""
    unread_s_max: float
    """Seconds that a client may pause reading when the socket buffers are full."""
    max_set_by: str = "--max-connections"
    """What `connections_max` comes from, for the log."""


class TurnedAwayLog:
    """Log of connections beyond the limit: a line at most every `TURNED_AWAY_LOG_S`, with their number."""

    def __init__(self) -> None:
        self._logged = 0
        self._logged_at = -math.inf

    def note(self, counters: HttpCounters, limits: ConnectionLimits, now: float) -> None:
        """Log what was turned away since the last line, unless that was short ago."""
        if now - self._logged_at < TURNED_AWAY_LOG_S:
            return
        count = counters.connections_turned_away - self._logged
        self._logged, self._logged_at = counters.connections_turned_away, now
        about = "client connections turned away: %d; %d are open, the limit (%s)"
        log.warning(about, count, limits.connections_max, limits.max_set_by)


class Connection(HttpToolsProtocol):
    """One client connection, with the `limits` and `counters` of its subclass."""

    limits: ConnectionLimits
    counters: HttpCounters
    turned_away_log: TurnedAwayLog
    is_draining = False
    """Whether the server is stopping; of the subclass, so of all connections of a server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._refusal: RequestError | None = None
        self._in_request = False
        self._in_head = False
        self._head_bytes = 0
        self._fed_bytes = 0
        self._hung_up = False
        self._is_lost = False
        self._served: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the one that arrived last."""

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        with contextlib.suppress(OSError):  # on macOS, if the client has left already
            connected = transport.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        beyond = len(self.connections) - self.limits.connections_max
        if beyond <= 0:
            self._expect()
            if self.is_draining:
                self.shutdown()
            return
        self.counters.turned_away()
        self.turned_away_log.note(self.counters, self.limits, self.loop.time())
        if beyond <= TURNED_AWAY_MAX:
            self.app = cast(Any, self._turn_away)
            self._expect(TURN_AWAY_S_MAX)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self._cancel_unread()
        self._is_lost = True
        super().connection_lost(exc)
        if self._served is not None:
            self._served.disconnected = True
            self._served.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # uvicorn notifies only the last of several requests of a disconnect.
        self._served = cycle
        if self.is_draining and not self.pipeline:
            cycle.keep_alive = False
        fast_path.offer(cycle)

        async def bounded(scope: Scope, receive: Receive, send: Send) -> Any:
            if scope["http_version"] != "1.1":
                send = _close_delimited(cycle, send)
            try:
                return await app(scope, receive, send)
            finally:
                # After a failure in the middle of a response, uvicorn closes the connection next.
                self.loop.call_soon(self._bound_close)

        super()._start_asgi_task(cycle, cast(Any, bounded))

    # --- the client's data ---

    def data_received(self, data: bytes) -> None:
        """Parse data, as uvicorn does, but for offers of another protocol."""
        if self._hung_up:
            return
        self._unset_keepalive_if_required()
        self._expect()
        if self._in_head:
            self._fed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # The parser has skipped the body, because it takes offers for accepted. A server may ignore them
            # (RFC 9110, section 7.8): the request begins again without.
            self.data_received(self._head_without_offer() + data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse(
                self._refusal or RequestError(Code.INVALID_REQUEST, "This is not a valid HTTP request.")
            )
        # `on_header` is not called for a header that never ends.
        if self._in_head and self._fed_bytes > HEAD_BYTES_MAX:
            self._refuse(RequestError(Code.HEADERS_TOO_LARGE))

    def _offers_upgrade(self) -> bool:
        """Return whether the client offers another protocol, as `curl --http2` and Java's client do."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def eof_received(self) -> None:
        self._close()

    # --- clients that do not read ---

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_unread()
        self._bound_close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_draining and not self.transport.is_closing() and not self._answering():
            self.shutdown()
        self._bound_close()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._bound_close()

    def shutdown(self) -> None:
        """Close behind the response to the last request, or soon if there is none. Called when the server
        begins to stop, and then whenever the connection becomes idle."""
        if self._answering():
            # The head of a response that has begun did not say so: the client may send another request.
            self.cycle.keep_alive &= self.cycle.response_started
        elif not self._in_request:
            self._expect_nothing()
            self._expect(LAST_REQUEST_S_MAX)

    def _close(self) -> None:
        self.transport.close()
        self._bound_close()

    def _bound_close(self) -> None:
        """Abort a closing transport that does not finish in time."""
        if self.transport.is_closing() and not self._is_lost:
            self._expect_reading()

    def _expect_reading(self) -> None:
        """Start the read timeout, unless it runs. It aborts, because `close` would wait until everything is
        read."""
        if self._unread is None:
            self._unread = self.loop.call_later(self.limits.unread_s_max, self._give_up_reading)

    def _give_up_reading(self) -> None:
        peer = self.transport.get_extra_info("peername")
        about = "%s disconnected: it has read nothing for %g s (--read-timeout)"
        log.info(about, peer[0] if peer else "?", self.limits.unread_s_max)
        self.transport.abort()

    def _cancel_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    # --- parser callbacks ---

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_request = self._in_head = True
        self._head_bytes = self._fed_bytes = 0
        if self.is_draining:
            self._expect_nothing()  # that was for a request to begin
        self._expect()

    def on_url(self, url: bytes) -> None:
        self._take_in(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._take_in(len(name) + len(value))
        super().on_header(name, value)

    def _take_in(self, count: int) -> None:
        """Count the bytes of a part of the head before it is stored."""
        self._head_bytes += count
        if self._head_bytes > HEAD_BYTES_MAX or len(self.headers) >= HEADERS_MAX:
            self._stop(RequestError(Code.HEADERS_TOO_LARGE))

    def on_headers_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._in_head = False
        if len(self.pipeline) >= PIPELINED_MAX:
            self._stop(RequestError(Code.INVALID_REQUEST))  # not sent: an earlier response is in progress
        self._expect_nothing()
        self._expect()
        if (authority := authority_of(self.url)) is not None:  # it replaces Host (RFC 9112, 3.2.2)
            others = [header for header in self.headers if header[0] != b"host"]
            self.headers[:] = [(b"host", authority), *others]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._in_request = False
        self._expect_nothing()
        super().on_message_complete()

    # --- deadlines ---

    def _expect(self, within_s: float | None = None) -> None:
        """Start the deadline for the next part of a request, unless it runs already."""
        if self._deadline is None and not self.transport.is_closing():
            in_body = self._in_request and not self._in_head
            due_s = self.limits.body_s_max if in_body else min(HEAD_S_MAX, self.limits.body_s_max)
            self._deadline = self.loop.call_later(within_s or due_s, self._too_late)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        behind_another = bool(self.pipeline) or (self._in_head and self._answering())
        if behind_another or self.flow.read_paused:  # it may have arrived without being read yet
            self._expect()
        elif self._in_request:
            self._refuse(RequestError(Code.REQUEST_TIMEOUT))
        elif not self._answering():
            self._close()

    # --- rejections ---

    async def _turn_away(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._rejection(RequestError(Code.TOO_MANY_CONNECTIONS, retry_after_s=1.0), scope)
        await response(scope, receive, send)

    def _rejection(self, error: RequestError, scope: Scope | None = None) -> Response:
        """Return the response that ends the connection, and count it."""
        response = error_response(error, scope)
        response.headers["connection"] = "close"
        response.headers["x-request-id"] = new_request_id()
        self.counters.answered(response.status_code)
        self.counters.failed(error.code.value)
        return response

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop(self, refusal: RequestError) -> None:
        """Raise out of the parser."""
        self._refusal = refusal
        raise refusal

    def _refuse(self, error: RequestError) -> None:
        """Send the error, unless that would interrupt a response, and close the connection."""
        if self.transport.is_closing() or self._hung_up:
            return
        begun = self._answering() and (self.cycle.response_started or self._in_head)
        if begun or self.pipeline:
            self.counters.failed(error.code.value)
            self._close()
        else:
            self.transport.write(_raw(self._rejection(error)))
            self._hang_up()

    def _hang_up(self) -> None:
        """Stop sending and ignore further input.

        The connection is closed when the client closes it, or after `LINGER_S_MAX`. If it were closed at
        once, data that the client still sends would trigger a reset, which may overtake the error response.
        """
        self._hung_up = True
        self._expect_nothing()
        if self._answering():
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_S_MAX, self._close)


def connection_type(limits: ConnectionLimits, counters: HttpCounters) -> type[Connection]:
    """Return the protocol class that uvicorn instantiates for each connection."""
    members = {"limits": limits, "counters": counters, "turned_away_log": TurnedAwayLog()}
    return cast(type[Connection], type("LimitedConnection", (Connection,), members))


def authority_of(url: bytes) -> bytes | None:
    """Return the authority of a request target in absolute form, as for a proxy; None for any other form."""
    if url.startswith(b"/") or b"://" not in url:
        return None
    return re.split(rb"[/?#]", url.partition(b"://")[2], maxsplit=1)[0]


def _close_delimited(cycle: RequestResponseCycle, send: Send) -> Send:
    """Return an ASGI `send` for a client of HTTP/1.0, which cannot read chunks (RFC 9112, section 6.1).

    uvicorn sends every body without a length in chunks. Here the connection's end ends it: uvicorn keeps no
    connection of HTTP/1.0 open.
    """
    is_unframed = False

    async def send_unframed(message: Message) -> None:
        nonlocal is_unframed
        if message["type"] == "http.response.start":
            is_unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if is_unframed:
                cycle.chunked_encoding = False  # None would let uvicorn choose chunks
        elif is_unframed:
            # Without chunks, uvicorn compares what is sent with the declared length.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unframed


def _raw(response: Response) -> bytes:
    phrase = http.HTTPStatus(response.status_code).phrase.encode()
    lines = [b"HTTP/1.1 %d %s" % (response.status_code, phrase)]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


def available_connections(wanted: int) -> int:
    """Return how many of `wanted` connections the file descriptor limit allows, after raising it if
    possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + TURNED_AWAY_MAX + DESCRIPTORS_SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return max(1, wanted - (needed - raised))
