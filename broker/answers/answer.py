"""A durable answer: the gateway itself reads its flights, and any number of readers read the answer. Pure.

The answer is an append-only list of the bytes that its one renderer made. Invariants:

* every reader gets the same bytes from the first one on, whenever it attaches, and then what is added;
* no reader holds the answer up, nor another reader: each has only a position in the list;
* what belongs to one reader alone, keepalives, is not in the list;
* the flights are released exactly once, when the answer is over or given up, and never from within a message
  of the dispatcher;
* an answer that failed is not joined again: a retry computes it anew.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from broker.dialects.renderers import Renderer
from broker.dispatch.flight import Batch, Flight, Item
from protocol.errors import Code, RequestError
from protocol.messages import Accepted, Failed, PrefixHit

log = logging.getLogger(__name__)

HEADERS_HELD_S_MAX = 1.0
"""Maximum time in seconds that the response waits, after acceptance, for the prefix cache report."""
DISK_S_MAX = 0.5
"""Longest wait for the disk in seconds, before readers get what is not on it."""
COLLECTED_S_MAX = 1.0
"""Maximum time in seconds, up to a sweep, for which output is collected before the journal gets it."""
CHUNK_BYTES = 64
"""Memory overhead of a chunk."""

Headers = Sequence[tuple[bytes, bytes]]
OpeningHeaders = Callable[[Sequence[Flight]], tuple[Headers, bool]]
"""Returns the headers of the response, and whether everything is known that they can say."""
Later = Callable[[Callable[[], None]], object]
"""Calls a function soon, from the event loop."""


@dataclass(slots=True, eq=False)
class DurableAnswer:
    """An answer that readers attach to.

    `owner`: of the request. `key`: the client's idempotency key, empty without one; `digest`: of the
    request that it stands for. `name`: the public id of a response, once there is one. `is_durable`: it runs
    to its end without readers. `own_bytes`: memory beside the chunks. `error`: why it failed before anything
    was rendered. `on_items`: gets what is about to be rendered. `on_flush`: writes what was collected of it,
    if nothing was for so many seconds.
    """

    owner: str
    clock: Callable[[], float]
    later: Later
    key: str = ""
    digest: bytes = b""
    name: str = ""
    is_durable: bool = False
    own_bytes: int = 0
    headers: Headers = ()
    chunks: list[bytes] = field(default_factory=list)
    error: RequestError | None = None
    over: bool = False
    failed: bool = False
    ended_at: float = 0.0
    left_at: float | None = None
    """Time since when it has no reader."""
    flights: Sequence[tuple[int, Flight]] = ()
    """The flights that are open, each with the number of its choice."""
    at: float = 0.0
    """Time of the latest output in seconds since 1970; 0: it is not recorded."""
    written: int = 0
    """Number of the journal's operation that has the latest output."""
    waits_for_disk: bool = False
    """Whether readers get only what the journal has, so that a later gateway renders the same after it."""
    on_held: Callable[[DurableAnswer], None] = lambda answer: None
    renderer: Renderer | None = None
    whole: Callable[[], bytes] | None = None
    """Returns the document for clients that do not stream; None: all readers get the chunks."""
    inputs: Callable[[], list[dict[str, Any]]] | None = None
    """Returns the input items of a response."""
    on_items: Callable[[int, list[Item]], None] | None = None
    on_flush: Callable[[float], None] = lambda age_s: None
    on_begin: Callable[[Headers], None] | None = None
    on_drop: Callable[[], None] | None = None
    on_over: Callable[[DurableAnswer], None] = lambda answer: None
    _opening: OpeningHeaders = lambda flights: ((), True)
    _release: Callable[[], None] | None = None
    _readers: list[Callable[[], None]] = field(default_factory=list)
    _arrived: list[Batch] = field(default_factory=list)
    _held: list[Batch] = field(default_factory=list)
    _held_since: float = 0.0
    _unwritten: deque[tuple[int, int]] = field(default_factory=deque)
    """Numbers of operations that are not on the disk yet, and of the chunks up to each."""
    _unwritten_since: float = 0.0
    _shown: int = 0
    _begun: bool = False
    _is_due: bool = False
    _chunk_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.own_bytes + self._chunk_bytes

    @property
    def has_readers(self) -> bool:
        return bool(self._readers)

    # --- from the flights ---

    def begin(self, renderer: Renderer) -> None:
        """Render what comes before any output, of a request that waits for its flights."""
        self.renderer, self._begun = renderer, True
        if self._add(renderer.due()):
            self._wake()

    def refuse(self, error: RequestError) -> None:
        """End an answer whose flights were not opened: by an event, if the answer has begun."""
        if not self._begun:
            self.fail(error)
            return
        failed = Failed(
            incarnation="", id=self.name, code=error.code, message=error.message, param=error.param
        )
        self.take([(0, [failed])])

    def open(
        self,
        flights: Sequence[tuple[int, Flight]],
        renderer: Renderer,
        opening: OpeningHeaders,
        release: Callable[[], None],
    ) -> None:
        """Read `flights` from now on. `release` closes them."""
        self.flights, self.renderer = flights, renderer
        self._opening, self._release = opening, release
        for choice, flight in flights:
            flight.on_item = partial(self._collect, choice, flight)
            self._collect(choice, flight)
        if self.over:  # it was given up while its request was prepared
            self.later(self.release)

    def _collect(self, choice: int, flight: Flight) -> None:
        """Take what has arrived at once: what waits in a flight is bounded by what a client may leave."""
        if items := flight.take():
            self._arrived.append((choice, items))
        self.poke()

    def poke(self) -> None:
        """Render soon what has arrived, or what the renderer itself has to say."""
        if not self._is_due:
            self._is_due = True
            self.later(self._drain)

    def _drain(self) -> None:
        self._is_due = False
        arrived, self._arrived = self._arrived, []
        if not self.over:
            self.take(arrived)

    def take(self, batches: Sequence[Batch]) -> None:
        """Render batches, or hold them back until the headers are known."""
        if self.on_items is not None:
            for choice, items in batches:
                self.on_items(choice, items)
        if self._held or not self._begun:
            if batches and not self._held:
                self._held_since = self.clock()
            self._held += batches
            if self._held and not self._begun and not self._is_known():
                return
            batches = self._release_held()
        self._render(batches)

    def _is_known(self) -> bool:
        if any(not isinstance(item, Accepted | PrefixHit) for _, items in self._held for item in items):
            return True
        return self._opening(self._opened)[1]

    @property
    def _opened(self) -> list[Flight]:
        return [flight for _, flight in self.flights]

    def _release_held(self) -> Sequence[Batch]:
        """Return what was held back; the headers are what is known of them now."""
        batches, self._held = self._held, []
        if batches:
            self._begin()
        return batches

    def _render(self, batches: Sequence[Batch]) -> None:
        renderer = self.renderer
        assert renderer is not None
        try:
            rendered = renderer.feed(batches)
        except RequestError as error:
            self.fail(error)
            return
        except Exception:  # the boundary of a request: its readers must learn that it is over
            log.exception("the answer %s cannot be rendered", self.name)
            self.fail(RequestError(Code.INTERNAL_ERROR))
            return
        is_news = self._add(rendered)
        if renderer.over:
            self.failed = any(_has_failed(items) for _, items in batches)
            self._end()
        elif is_news:
            self._wake()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self.headers = self.headers or self._opening(self._opened)[0]
            if self.on_begin is not None:
                self.on_begin(self.headers)

    def _add(self, rendered: bytes) -> bool:
        """Add a chunk. Return whether readers may have it now."""
        if not rendered:
            return False
        self.chunks.append(rendered)
        self._chunk_bytes += CHUNK_BYTES + len(rendered)
        if self.waits_for_disk and self.written:
            self._hold()
            return False
        return True

    def _hold(self) -> None:
        if not self._unwritten:
            self._unwritten_since = self.clock()
            self._shown = len(self.chunks) - 1
            self.on_held(self)
        self._unwritten.append((self.written, len(self.chunks)))

    def show(self, committed: int) -> bool:
        """Let readers have what is on the disk now. Return whether anything is left."""
        before = self.visible
        while self._unwritten and self._unwritten[0][0] <= committed:
            self._shown = self._unwritten.popleft()[1]
        if self.visible > before:
            # Only then: the journal also calls after a group that the disk has not taken.
            self._unwritten_since = self.clock()
            self._wake()
        return bool(self._unwritten)

    @property
    def visible(self) -> int:
        """Number of chunks that readers may have."""
        return len(self.chunks) if not self._unwritten else self._shown

    def sweep(self) -> None:
        """Write what was collected a while ago, and stop waiting for the disk or the headers."""
        if not self.over:
            self.on_flush(COLLECTED_S_MAX)
        if self._unwritten and self.clock() - self._unwritten_since >= DISK_S_MAX:
            # Whatever their numbers: a journal whose disk has failed never commits these operations.
            self.waits_for_disk = False
            self._unwritten.clear()
            self._wake()
        if self._held and not self.over and self.clock() - self._held_since >= HEADERS_HELD_S_MAX:
            self._render(self._release_held())

    # --- its end ---

    def fail(self, error: RequestError) -> None:
        """End it with an error, which readers that have nothing yet raise."""
        self.error, self.failed = error, True
        self._end()

    def _end(self) -> None:
        if self.over:
            return
        self.over, self.ended_at = True, self.clock()
        self._wake()
        self.on_over(self)
        self.later(self.release)

    def release(self) -> None:
        """Close the flights. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()
            self.flights = ()

    # --- readers ---

    def attach(self, wake: Callable[[], None]) -> None:
        """Add a reader; `wake` is called whenever there is more."""
        self._readers.append(wake)
        self.left_at = None

    def detach(self, wake: Callable[[], None]) -> None:
        self._readers.remove(wake)
        if not self._readers:
            self.left_at = self.clock()

    def _wake(self) -> None:
        for wake in self._readers:
            wake()

    def read(self, position: int) -> bytes:
        """Return everything behind the first `position` chunks."""
        end = self.visible
        return self.chunks[position] if end == position + 1 else b"".join(self.chunks[position:end])

    def idle(self) -> bytes:
        """Return what a reader gets that has waited for long; what all of them get is added instead."""
        if self.over or self.renderer is None:
            return b""
        if not self._begun and any(flight.attempt is not None for _, flight in self.flights):
            return b""  # accepted, or about to be: the status can still be an error's
        self._begin()
        if due := self.renderer.due():
            if self._add(due):
                self._wake()
            return b""
        return self.renderer.beat()


def _has_failed(items: Sequence[Item]) -> bool:
    return any(isinstance(item, Failed) for item in items)
