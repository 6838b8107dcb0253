"""Answer to a request: the output of its flights, rendered once, and followed by any number of readers. Pure.

It is an append-only list of the bytes that its one renderer made. Invariants:

* every reader gets the same bytes from the first one on, whenever it attaches, and then what is added;
* what belongs to one reader alone, keepalives, is not in the list;
* the flights are closed exactly once, when the answer is over or given up, and never from within a message
  of the dispatcher.

A durable answer goes on without readers, and none of them holds it up. Any other has one reader, and ends
with it. It keeps only what that has not read, and takes nothing from its flights while the reader's client
has to read first: what waits in them is bounded.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.answers.open_flights import Headers, OpenFlights
from broker.dialects.renderers import Renderer
from broker.dispatch.flight import Batch, Flight, Item
from protocol.errors import Code, RequestError
from protocol.messages import Accepted, Failed, PrefixHit

log = logging.getLogger(__name__)

HEADERS_HELD_S_MAX = 1.0
"""Maximum time in seconds that the response waits, after acceptance, for the prefix cache report."""
COLLECTED_S_MAX = 1.0
"""Maximum time in seconds, up to a sweep, for which output is collected before the journal gets it."""
CHUNK_BYTES = 64
"""Memory overhead of a chunk."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Clock and timers of an event loop."""

    clock: Callable[[], float]
    call_soon: Callable[[Callable[[], object]], object]
    call_later: Callable[[float, Callable[[], object]], object]


class AnswerObserver:
    """Observer of an answer. Each method does nothing by default; the order of observers does not matter."""

    def on_items(self, choice: int, items: list[Item]) -> None:
        """Called with output that is about to be rendered."""

    def on_begin(self, headers: Headers) -> None:
        """Called when the headers of the response are fixed, before the first chunk."""

    def on_keepalive(self) -> None:
        """Called when a keepalive is about to become part of the answer."""

    def on_flush(self, age_s: float) -> None:
        """Called to write what was collected, if nothing was written for `age_s` seconds."""

    def on_over(self, answer: Answer) -> None:
        """Called when the answer is over."""

    def on_drop(self) -> None:
        """Called when the answer is forgotten."""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """End of an answer. `error`: why it failed, if its chunks do not say so."""

    at: float
    error: RequestError | None = None
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class Answer:
    """Answer to one request."""

    scheduler: Scheduler
    owner: str = ""
    """Owner of the request."""
    key: str = ""
    """The client's idempotency key; empty without one."""
    digest: bytes = b""
    """Digest of the request that the key stands for."""
    name: str = ""
    """Public id of a response or stream, once there is one."""
    conversation: str = ""
    """The client's name of its conversation. Its readers count bytes, so keepalives are part of it."""
    created: int = 0
    """When a stream that has a name was requested, in seconds since 1970."""
    is_durable: bool = False
    """Whether it goes on without readers, and is kept for later ones."""
    in_background: bool = False
    """Whether it runs to its end, even if no reader comes."""
    nbytes: int = 0
    """Memory of the request and of all chunks."""
    headers: Headers = ()
    """Headers of the response, once they are fixed."""
    chunks: list[bytes] = field(default_factory=list)
    """All chunks, or those that the only reader has not read."""
    end: AnswerEnd | None = None
    left_at: float | None = None
    """Time since when it has no reader; None: it has one."""
    at: float = 0.0
    """Time of the latest output in seconds since 1970; 0: it is not recorded."""
    disk: DiskGate | None = None
    """Holds chunks back until they are on the disk; None: readers do not wait for it."""
    renderer: Renderer | None = None
    whole: bytes | None = None
    """The document for clients that do not stream; None: all readers get the chunks."""
    inputs: Callable[[], list[dict[str, Any]]] | None = None
    """Returns the input items of a response."""
    _observers: list[AnswerObserver] = field(default_factory=list)
    _open: OpenFlights | None = None
    _readers: list[Callable[[], None]] = field(default_factory=list)
    _early: list[Batch] | None = field(default_factory=list)
    """Output that is held back until the headers are known; None: no more is."""
    _dropped: int = 0
    """Number of chunks that were read and dropped."""
    _has_begun: bool = False
    """Whether the headers are fixed."""
    _is_due: bool = False
    """Whether output will be taken from the flights in the next iteration of the event loop."""
    _is_paused: bool = False
    """Whether no output is taken, because the reader's client has to read first."""

    @property
    def over(self) -> bool:
        return self.end is not None

    @property
    def flights(self) -> Sequence[tuple[int, Flight]]:
        """The flights that are open, each with the number of its choice."""
        return () if self._open is None else self._open.numbered

    def observe(self, observer: AnswerObserver) -> None:
        """Add an observer."""
        self._observers.append(observer)

    # --- from the flights ---

    def begin(self, renderer: Renderer) -> None:
        """Render what comes before any output, of a request that waits for its flights."""
        self.renderer, self._has_begun, self._early = renderer, True, None
        self._publish(renderer.due())

    def refuse(self, error: RequestError) -> None:
        """End an answer whose flights were not opened: by an event, if it has begun."""
        if not self._has_begun:
            self.fail(error)
            return
        failed = Failed(
            incarnation="", id=self.name, code=error.code, message=error.message, param=error.param
        )
        self.take([(0, [failed])])

    def open(self, flights: OpenFlights, renderer: Renderer) -> None:
        """Read `flights` from now on."""
        self._open, self.renderer = flights, renderer
        for _, flight in flights.numbered:
            flight.on_item, flight.is_collected = self.poke, self.is_durable
        self.poke()
        if self.end is not None:  # it was given up while its request was prepared
            self.scheduler.call_soon(self.release)

    def poke(self) -> None:
        """Render soon what has arrived, or what the renderer itself has to say."""
        if not self._is_due:
            self._is_due = True
            self.scheduler.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_due = False
        if self.end is None and not self._is_paused:
            self.take([] if self._open is None else self._open.take())

    def take(self, batches: list[Batch]) -> None:
        """Render batches, or hold them back until the headers are known."""
        for observer in self._observers:
            for choice, items in batches:
                observer.on_items(choice, items)
        early = self._early
        if early is None or not batches:
            self._render(batches)
            return
        is_first = not early
        early += batches
        if _has_output(early) or self._open is None or self._open.headers()[1]:
            self._render_early()
        elif is_first:
            self.scheduler.call_later(HEADERS_HELD_S_MAX, self._render_early)

    def _render_early(self) -> None:
        early, self._early = self._early, None
        if early and self.end is None:
            self._render(early)

    def _render(self, batches: Sequence[Batch]) -> None:
        assert self.renderer is not None
        try:
            rendered = self.renderer.feed(batches)
        except RequestError as error:
            self.fail(error)
        except Exception:  # the boundary of a request: its readers must learn that it is over
            log.exception("the answer %s cannot be rendered", self.name)
            self.fail(RequestError(Code.INTERNAL_ERROR))
        else:
            self._publish(rendered, batches)

    def _publish(self, rendered: bytes, batches: Sequence[Batch] = ()) -> None:
        """Add the chunk that was rendered from `batches`, and end the answer if that was the last one."""
        assert self.renderer is not None
        is_readable = bool(rendered)
        if rendered:
            if not self._has_begun:
                self._fix_headers()
            self.chunks.append(rendered)
            self.nbytes += CHUNK_BYTES + len(rendered)
            is_readable = self.disk is None or not self.disk.hold(len(self.chunks))
        if self.renderer.over:
            failed = any(isinstance(item, Failed) for _, items in batches for item in items)
            self._end(AnswerEnd(self.scheduler.clock(), has_failed=failed))
        elif is_readable:
            self._wake()

    def _fix_headers(self) -> None:
        self._has_begun = True
        self.headers = self.headers or (() if self._open is None else self._open.headers()[0])
        for observer in self._observers:
            observer.on_begin(self.headers)

    # --- the disk ---

    @property
    def visible(self) -> int:
        """Number of chunks that readers may have."""
        limit = None if self.disk is None else self.disk.limit
        return self._dropped + len(self.chunks) if limit is None else limit

    def show(self, committed: int) -> bool:
        """Let readers have what is on the disk now. Return whether anything is left."""
        if self.disk is None:
            return False
        if self.disk.advance(committed):
            self._wake()
        return self.disk.limit is not None

    def flush(self, age_s: float) -> None:
        """Write what was collected, if nothing was written for `age_s` seconds."""
        for observer in self._observers:
            observer.on_flush(age_s)

    def sweep(self) -> None:
        """Write what was collected a while ago, and stop waiting for a disk that is late."""
        if self.end is None:
            self.flush(COLLECTED_S_MAX)
        if self.disk is not None and self.disk.is_late:
            self.disk = None
            self._wake()

    # --- its end ---

    def fail(self, error: RequestError) -> None:
        """End it with an error, for readers that have nothing yet."""
        self._end(AnswerEnd(self.scheduler.clock(), error, has_failed=True))

    def _end(self, end: AnswerEnd) -> None:
        if self.end is not None:
            return
        self.end = end
        self._wake()
        for observer in self._observers:
            observer.on_over(self)
        if self._open is not None:
            self.scheduler.call_soon(self.release)

    def drop(self) -> None:
        """End it if it runs; it is forgotten."""
        self.fail(RequestError(Code.REQUEST_CANCELLED))
        for observer in self._observers:
            observer.on_drop()

    def release(self) -> None:
        """Close the flights. Idempotent."""
        flights, self._open = self._open, None
        if flights is None:
            return
        if self.end is None:
            flights.close(499)
        elif self.end.error is not None:
            flights.close(self.end.error.kind.status)
        else:
            flights.close(None if self.is_durable else 200)

    # --- readers ---

    def attach(self, wake: Callable[[], None]) -> None:
        """Add a reader; `wake` is called whenever there is more."""
        self._readers.append(wake)
        self.left_at = None

    def detach(self, wake: Callable[[], None]) -> None:
        """Remove a reader. An answer that is not durable ends with it."""
        self._readers.remove(wake)
        if not self._readers:
            self.left_at = self.scheduler.clock()
            if not self.is_durable:
                self.release()
                self._end(AnswerEnd(self.left_at, has_failed=True))

    def _wake(self) -> None:
        for wake in self._readers:
            wake()

    def read(self, position: int) -> tuple[bytes, int]:
        """Return everything behind the first `position` chunks, and the number of chunks up to its end."""
        chunks, visible = self.chunks, self.visible
        first, end = position - self._dropped, visible - self._dropped
        body = chunks[first] if end == first + 1 else b"".join(chunks[first:end])
        if not self.is_durable:
            self._dropped = visible
            chunks.clear()
        return body, visible

    def ends_at(self, position: int) -> bool:
        """Return whether nothing comes behind the first `position` chunks."""
        return self.end is not None and position == self._dropped + len(self.chunks)

    def pause(self) -> None:
        """Leave all output in the flights of an answer that is not durable, while its reader sends."""
        if not self.is_durable and self._open is not None:
            self._is_paused = True
            self._open.set_unread_since(self.scheduler.clock())

    def resume(self) -> None:
        """Go on, with what has arrived while the reader sent."""
        if self._is_paused and self._open is not None:
            self._is_paused = False
            self._open.set_unread_since(None)
            if self.end is None and (batches := self._open.take()):
                self.take(batches)

    def idle(self) -> bytes:
        """Return what a reader gets that has waited for long; what all of them get is added instead."""
        renderer = self.renderer
        if renderer is None or not (self._has_begun or self._open is None or self._open.are_waiting):
            return b""  # accepted, or about to be: the status can still be an error's
        self._render_early()
        if self.end is not None:
            return b""
        if due := renderer.due():
            self._publish(due)
        elif self.conversation:
            self.add_keepalive()
        elif keepalive := renderer.keepalive():
            if not self._has_begun:
                self._fix_headers()
            return keepalive
        return b""

    def add_keepalive(self) -> None:
        """Make a keepalive part of the answer."""
        assert self.renderer is not None
        self._render_early()
        for observer in self._observers:
            observer.on_keepalive()
        self._publish(self.renderer.keepalive())


def _has_output(batches: Sequence[Batch]) -> bool:
    return any(not isinstance(item, Accepted | PrefixHit) for _, items in batches for item in items)


# Gate of an answer: readers get only what is on the disk, so that a later gateway renders the same. Pure.

DISK_S_MAX = 0.5
"""Longest wait for the disk in seconds, before readers get what is not on it."""


class DiskGate:
    """Holds chunks of an answer back until the journal has committed what they are rendered from."""

    def __init__(self, clock: Callable[[], float], on_hold: Callable[[], object]) -> None:
        """`on_hold`: called when chunks begin to wait."""
        self.written = 0
        """Number of the journal's operation that has the latest output; 0: it takes none."""
        self._clock = clock
        self._on_hold = on_hold
        self._unwritten: deque[tuple[int, int]] = deque()
        """Numbers of operations that are not on the disk yet, and of the chunks up to each."""
        self._limit = 0
        self._since = 0.0

    @property
    def limit(self) -> int | None:
        """Number of chunks that readers may have; None: all."""
        return self._limit if self._unwritten else None

    def hold(self, count: int) -> bool:
        """Hold back the last of `count` chunks. Return False if the journal does not take it either."""
        if not self.written:
            return False
        if not self._unwritten:
            self._limit, self._since = count - 1, self._clock()
            self._on_hold()
        self._unwritten.append((self.written, count))
        return True

    def advance(self, committed: int) -> bool:
        """Let readers have what is on the disk now. Return whether that is more than before."""
        before = self._limit
        while self._unwritten and self._unwritten[0][0] <= committed:
            self._limit = self._unwritten.popleft()[1]
        if self._limit > before:
            # Only then: the journal also calls after a group that the disk has not taken.
            self._since = self._clock()
        return self._limit > before

    @property
    def is_late(self) -> bool:
        """Whether chunks wait for too long, whatever their numbers: a journal whose disk has failed never
        commits these operations."""
        return bool(self._unwritten) and self._clock() - self._since >= DISK_S_MAX
