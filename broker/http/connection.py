"""HTTP connections: uvicorn's, with a bound on what a client may cost us before its request is whole.

uvicorn waits for a request's head and body for ever, takes heads of any size, and turns away with plain text.
Here a request that has begun must arrive in time, its head is bounded, so are the connections, and every
refusal is an error object.

One deadline runs from the first byte of a request (from the connection, for the first one) until its head is
whole, and another one until its last byte. They start again while an answer before it is under way, and say
nothing about how long an answer may take. Who does not read his answer, though, holds what is kept for him:
once the sockets' buffers are full he must go on reading in time, or the connection ends.
"""

from __future__ import annotations

import asyncio
import http
import resource
from dataclasses import dataclass
from typing import Any, cast

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from broker.http import straight
from broker.http.errors import error_response
from broker.http.ids import new_request_id
from broker.http.parser import Parser, head_without_offer, offers_upgrade
from protocol.errors import Code, RequestError

HEAD_BYTES_MAX = 64 * 1024
HEADERS_MAX = 100
HEAD_S_MAX = 10.0
"""Less than a large body may take: whoever holds connections with unfinished heads loses them soon."""
PIPELINED_MAX = 16
"""Requests that may wait on one connection for the answers to those before them."""
TURNED_AWAY_MAX = 64
"""Connections beyond the limit that are told so; further ones are closed without a word."""
TURN_AWAY_S_MAX = 5.0
LINGER_S_MAX = 2.0
DESCRIPTORS_SPARE = 128
"""Descriptors for everything that is no client's connection."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`body_s_max`: from the end of a request's head to its last byte. `unread_s_max`: until a client that is
    behind reads on."""

    connections_max: int
    body_s_max: float
    unread_s_max: float


class Connection(HttpToolsProtocol):
    """One client's connection, under the `limits` of its subclass."""

    limits: Limits
    parser: Parser

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = Parser(self)
        # As uvicorn has it: what comes behind a last request must not cost us the answer to that one.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._refusal: RequestError | None = None
        self._in_request = False
        self._in_head = False
        self._head_bytes = 0
        self._fed_bytes = 0
        self._hung_up = False
        self._served: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the last one that has come."""

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        beyond = len(self.connections) - self.limits.connections_max
        if beyond > TURNED_AWAY_MAX:
            transport.abort()
            return
        if beyond > 0:
            self.app = cast(Any, _turn_away)
        self._expect(TURN_AWAY_S_MAX if beyond > 0 else None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)
        self.resume_writing()
        if self._served is not None:
            self._served.disconnected = True
            self._served.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # uvicorn tells only the last one of several that the client has gone.
        self._served = cycle
        straight.offer(cycle)
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._hung_up:
            return
        self._expect()
        if self._in_head:
            self._fed_bytes += len(data)
        super().data_received(data)
        # A header that never ends is not shown to `on_header`.
        if self._in_head and self._fed_bytes > HEAD_BYTES_MAX:
            self._refuse(RequestError(Code.HEADERS_TOO_LARGE))

    def pause_writing(self) -> None:
        super().pause_writing()
        # Not `close`, which waits until all is read.
        self._unread = self.loop.call_later(self.limits.unread_s_max, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """What could not be parsed, or was refused while it was."""
        self._refuse(self._refusal or RequestError(Code.INVALID_REQUEST, "This is not HTTP."))

    # --- what the parser finds ---

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_request = self._in_head = True
        self._head_bytes = self._fed_bytes = 0
        self._expect()

    def on_url(self, url: bytes) -> None:
        self._take_in(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._take_in(len(name) + len(value))
        super().on_header(name, value)

    def _take_in(self, count: int) -> None:
        """A part of a head, of so many bytes, before it is kept."""
        self._head_bytes += count
        if self._head_bytes > HEAD_BYTES_MAX or len(self.headers) >= HEADERS_MAX:
            self._stop(RequestError(Code.HEADERS_TOO_LARGE))

    def on_headers_complete(self) -> None:
        if self._offers_upgrade():
            return
        if len(self.pipeline) >= PIPELINED_MAX:
            self._stop(RequestError(Code.INVALID_REQUEST, "Too many requests wait on this connection."))
        self._in_head = False
        self._expect_nothing()
        self._expect()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._in_request = False
        self._expect_nothing()
        super().on_message_complete()

    def _offers_upgrade(self) -> bool:
        """Whether this is a request that is about to be read again, without its offer (`curl --http2`)."""
        return self.parser.should_upgrade() and offers_upgrade(self.headers)

    def _unsupported_upgrade_warning(self) -> None:
        """Called when the parser has come upon an offer of another protocol, which we do not take up."""
        rest, head = self.parser.rest, b""
        if offers_upgrade(self.headers):
            parser = self.parser
            head = head_without_offer(parser.get_method(), self.url, parser.get_http_version(), self.headers)
        if head or rest:
            super().data_received(head + rest)

    # --- the deadline ---

    def _expect(self, within_s: float | None = None) -> None:
        """More of a request, unless more is expected already."""
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
        if behind_another or self.flow.read_paused:  # it may well be there, and is not read yet
            self._expect()
        elif self._in_request:
            self._refuse(RequestError(Code.REQUEST_TIMEOUT))
        elif not self._answering():
            self.transport.close()

    # --- refusals ---

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop(self, refusal: RequestError) -> None:
        """Out of the parser, which hands what it was to `send_400_response`."""
        self._refusal = refusal
        raise refusal

    def _refuse(self, error: RequestError) -> None:
        """Say so, unless that would land in the middle of an answer, and hang up."""
        if self.transport.is_closing() or self._hung_up:
            return
        begun = self._answering() and (self.cycle.response_started or self._in_head)
        if begun or self.pipeline:
            self.transport.close()
        else:
            self.transport.write(_raw(error))
            self._hang_up()

    def _hang_up(self) -> None:
        """Say nothing more, and hear nothing more.

        The connection is closed when the client does so, or soon. If it were closed at once, what the client
        is still sending would be answered with a reset, which may overtake what it was told.
        """
        self._hung_up = True
        self._expect_nothing()
        if self._answering():
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_S_MAX, self.transport.close)


def connection_type(limits: Limits) -> type[Connection]:
    """What uvicorn makes of each connection."""
    return cast(type[Connection], type("LimitedConnection", (Connection,), {"limits": limits}))


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
    """As many of them as the operating system gives us descriptors for; it is asked to raise its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + TURNED_AWAY_MAX + DESCRIPTORS_SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return max(1, wanted - (needed - raised))
