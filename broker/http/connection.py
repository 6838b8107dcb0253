"""HTTP connections: uvicorn's protocol, with limits on what a client may use before its request is complete.

uvicorn waits forever for a request's head and body, accepts heads of any size, and rejects with plain text.
Here requests have deadlines, the size of heads and the number of connections are limited, and every rejection
is an error object.

One deadline runs from the first byte of a request (for the first one, from the connection) until its head is
complete, a second one until its last byte. They restart while an earlier response on the connection is in
progress, and do not limit the duration of a response. A client that does not read its response is
disconnected after `unread_s_max`, once the socket buffers are full. The same limit holds for the rest of a
response after the connection is closed, because a transport closes only when everything is sent.

Pipelined requests are parsed piece by piece, while fewer than `PIPELINED_MAX` wait for the responses before
them; otherwise the data waits, and soon the connection is not read. The end of a client's data does not
cancel its complete requests (`half_close`). Beyond the limit of connections, a new one replaces the one that
has had no request for longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import resource
import socket
from dataclasses import dataclass
from typing import Any, cast

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from broker.http import fast_path
from broker.http.close_delimited import close_delimited
from broker.http.errors import error_response
from broker.http.half_close import HalfClose
from broker.http.ids import new_request_id
from broker.http.parser import Parser, authority_of, head_without_offer, offers_upgrade
from protocol.errors import Code, RequestError

HEAD_BYTES_MAX = 64 * 1024
HEADERS_MAX = 100
HEAD_S_MAX = 10.0
"""Shorter than the limit for large bodies, so that connections with unfinished heads are closed soon."""
PIPELINED_MAX = 16
"""Number of pipelined requests that wait for earlier responses; with more, the data behind them waits."""
PIECE_BYTES = 4096
"""Number of bytes parsed at a time. The requests in one piece may exceed `PIPELINED_MAX`."""
UNPARSED_BYTES_MAX = 64 * 1024
"""Number of bytes behind the pipelined requests, beyond which the connection is not read. Below it, the
departure of the client is noticed."""
UNSENT_BYTES_MAX = 16 * 1024
"""Number of bytes beyond the client's receive window that the kernel takes, and as many that the transport
takes before it pauses. More would hide a client that does not read: on loopback, Linux takes 2.5 MB."""
TURNED_AWAY_MAX = 64
"""Maximum number of connections beyond the limit that get an error response; further ones are aborted."""
TURN_AWAY_S_MAX = 5.0
LINGER_S_MAX = 2.0
LAST_REQUEST_S_MAX = 1.0
"""Time that a connection without a request stays open when the server stops. A request that was on its way is
answered, and its response says that the connection closes."""
DESCRIPTORS_SPARE = 128
"""File descriptors reserved for everything but client connections."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of client connections.

    `body_s_max`: seconds from the end of a request's head to its last byte. `unread_s_max`: seconds that a
    client may pause reading when the socket buffers are full.
    """

    connections_max: int
    body_s_max: float
    unread_s_max: float


class Connection(HttpToolsProtocol):
    """One client connection, with the `limits` of its subclass."""

    limits: ConnectionLimits
    idle: dict[Connection, None]
    """The connections without a complete head of a request, in the order in which they became idle."""
    is_draining = False
    """Whether the server is stopping; of the subclass, so of all connections of a server."""
    parser: Parser

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = Parser(self)
        # As in uvicorn: data after the last request must not prevent its response.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._refusal: RequestError | None = None
        self._in_request = False
        self._in_head = False
        self._head_bytes = 0
        self._fed_bytes = 0
        self._unparsed = bytearray()
        self._at_eof = False
        self._half_close: HalfClose | None = None
        self._hung_up = False
        self._is_lost = False
        self._served: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the one that arrived last."""

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self._unparsed)
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        with contextlib.suppress(OSError):  # on macOS, if the client has left already
            connected = transport.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        beyond = len(self.connections) - self.limits.connections_max
        if beyond <= 0 or self._replace_idle():
            self.idle[self] = None
            self._expect()
            if self.is_draining:
                self.shutdown()
        elif beyond <= TURNED_AWAY_MAX:
            self.app = cast(Any, _turn_away)
            self._expect(TURN_AWAY_S_MAX)
        else:
            transport.abort()

    def _replace_idle(self) -> bool:
        """Close the connection that has been idle for longest; return whether there was one.

        One that has not sent all of its last response would not close at once, so it does not count.
        """
        for connection in self.idle:
            if not connection.transport.get_write_buffer_size():
                del self.idle[connection]
                connection.transport.close()
                return True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self.idle.pop(self, None)
        self._unparsed.clear()
        if self._half_close is not None:
            self._half_close.stop()
        self._is_lost = True
        super().connection_lost(exc)
        self.resume_writing()
        self._cancel_unread()
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
                send = close_delimited(cycle, send)
            try:
                return await app(scope, receive, send)
            finally:
                # After a failure in the middle of a response, uvicorn closes the connection next.
                self.loop.call_soon(self._bound_close)

        super()._start_asgi_task(cycle, cast(Any, bounded))

    # --- the client's data ---

    def data_received(self, data: bytes) -> None:
        if self._hung_up:
            return
        self._unparsed += data
        self._parse()
        if len(self._unparsed) > UNPARSED_BYTES_MAX:
            self.flow.pause_reading()

    def _parse(self) -> None:
        """Parse what has arrived, until `PIPELINED_MAX` requests wait."""
        while self._unparsed and len(self.pipeline) < PIPELINED_MAX:
            if self._hung_up or self.transport.is_closing():
                self._unparsed.clear()
                return
            piece = bytes(self._unparsed[:PIECE_BYTES])
            del self._unparsed[:PIECE_BYTES]
            self._parse_piece(piece)
        if self._at_eof and not self._unparsed:
            self._end_input()

    def _parse_piece(self, piece: bytes) -> None:
        self._expect()
        if self._in_head:
            self._fed_bytes += len(piece)
        super().data_received(piece)
        # `on_header` is not called for a header that never ends.
        if self._in_head and self._fed_bytes > HEAD_BYTES_MAX:
            self._refuse(RequestError(Code.HEADERS_TOO_LARGE))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open for the responses to complete requests. May be called repeatedly."""
        if self._hung_up:
            return False
        if self._at_eof:
            return True
        self._at_eof = True
        self._parse()
        if self._served is not None and not self.transport.is_closing():
            self._half_close = HalfClose(self.transport, self.loop)
            self._half_close.start(self._served)
        return True

    def _end_input(self) -> None:
        """Close the connection after the response to the last complete request. Idempotent."""
        self._expect_nothing()
        is_cut_off = self._in_request and not self._in_head
        self._in_request = False
        if is_cut_off and self.pipeline:
            self.pipeline.popleft()
        elif is_cut_off or self._served is None or self._served.response_complete:
            self._close()
            return
        last = self.pipeline[0][0] if self.pipeline else self._served
        assert last is not None
        last.keep_alive = False

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
        if not self.transport.is_closing():
            self._parse()
            self.flow.resume_reading()
            if not self._answering():
                self.idle[self] = None
                if self.is_draining:
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
            self._unread = self.loop.call_later(self.limits.unread_s_max, self.transport.abort)

    def _cancel_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Reject a request that could not be parsed, or was rejected by a parser callback."""
        self._refuse(self._refusal or RequestError(Code.INVALID_REQUEST, "This is not a valid HTTP request."))

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
        self.idle.pop(self, None)
        self._in_head = False
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

    def _offers_upgrade(self) -> bool:
        """Return whether this request will be parsed again without its upgrade offer (`curl --http2`)."""
        return self.parser.should_upgrade() and offers_upgrade(self.headers)

    def _unsupported_upgrade_warning(self) -> None:
        """Parse the request again without its upgrade offer, which is ignored; called by uvicorn."""
        rest, head = self.parser.rest, b""
        if offers_upgrade(self.headers):
            parser = self.parser
            head = head_without_offer(parser.get_method(), self.url, parser.get_http_version(), self.headers)
        self._unparsed[:0] = head + rest

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

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop(self, refusal: RequestError) -> None:
        """Raise out of the parser, which calls `send_400_response`."""
        self._refusal = refusal
        raise refusal

    def _refuse(self, error: RequestError) -> None:
        """Send the error, unless that would interrupt a response, and close the connection."""
        if self.transport.is_closing() or self._hung_up:
            return
        begun = self._answering() and (self.cycle.response_started or self._in_head)
        if begun or self.pipeline:
            self._close()
        else:
            self.transport.write(_raw(error))
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
        self._unparsed.clear()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_S_MAX, self._close)


class _Flow(FlowControl):
    """Flow control that does not resume reading while too much is `unparsed`."""

    def __init__(self, transport: asyncio.Transport, unparsed: bytearray) -> None:
        super().__init__(transport)
        self._unparsed = unparsed

    def resume_reading(self) -> None:
        if len(self._unparsed) <= UNPARSED_BYTES_MAX:
            super().resume_reading()


def connection_type(limits: ConnectionLimits) -> type[Connection]:
    """Return the protocol class that uvicorn instantiates for each connection."""
    return cast(type[Connection], type("LimitedConnection", (Connection,), {"limits": limits, "idle": {}}))


def _raw(error: RequestError) -> bytes:
    response = error_response(error)
    response.headers["connection"] = "close"
    response.headers["x-request-id"] = new_request_id().decode()
    phrase = http.HTTPStatus(response.status_code).phrase.encode()
    lines = [b"HTTP/1.1 %d %s" % (response.status_code, phrase)]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


async def _turn_away(scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(RequestError(Code.TOO_MANY_CONNECTIONS, retry_after_s=1.0), scope)
    response.headers["connection"] = "close"
    response.headers["x-request-id"] = new_request_id().decode()
    await response(scope, receive, send)


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
