"""Preparation queue: which request is rendered and tokenized next, within bounds of number and memory. Pure.

Requests are *short* or *long*, by their estimated cost. One lane of the pool takes short ones only, so they
never wait behind a long one; the other takes long ones first, so short ones cannot starve them. Within each
of the two, clients take turns, and of one client's requests the one with the smallest arrival time plus cost,
in seconds, is next: the shortest first, but none is overtaken by those that arrive later than its own cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET

from protocol.conversation import packed_bytes
from protocol.errors import Code, RequestError
from protocol.messages import Generate, Request
from protocol.types import PreparationStatus

REQUESTS_MAX = 4096
"""Maximum number of requests in preparation; the gateway's own limit of waiting requests is far below."""
BYTES_MAX = 2**27
"""Maximum bytes of their messages and media. A request that is alone is accepted whatever its size."""
SHORT_COST_MAX = 2**18
"""Maximum cost of a short request, in bytes of text. To tokenize that many takes about 0.1 s."""
COST_PER_S = 2**21
"""Bytes of text that a tokenizer reads in a second, about."""
IMAGE_COST = SHORT_COST_MAX
"""Cost of images beside their bytes: a file of a few kilobytes may take a second to decode."""
GRAMMAR_COST = SHORT_COST_MAX
"""Cost of structured output: whatever its size, a grammar may take seconds to compile."""


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A request in preparation. `nbytes`: of its message and media. `cost`: the estimated work, in bytes of
    text. `arrived_at`: in seconds."""

    id: str
    client: str
    nbytes: int
    cost: int
    arrived_at: float

    @property
    def is_short(self) -> bool:
        return self.cost <= SHORT_COST_MAX

    @property
    def rank(self) -> float:
        """Place among the requests of the same client; the smallest is next."""
        return self.arrived_at + self.cost / COST_PER_S


def entry_of(request: Request, media: Sequence[bytes], now: float) -> QueueEntry:
    """Return the queue entry of a request that arrives at `now`."""
    text_bytes, cost = _text_bytes(request), 0
    if isinstance(request, Generate):
        calling = request.calling
        has_grammar = calling is not None and (calling.required or calling.name or calling.strict)
        cost = IMAGE_COST + sum(map(len, media)) if media else 0
        cost += GRAMMAR_COST if request.form is not None or has_grammar else 0
    nbytes = text_bytes + sum(map(len, media))
    return QueueEntry(request.id, request.client, nbytes, text_bytes + cost, now)


def _text_bytes(request: Request) -> int:
    if not isinstance(request, Generate):
        return 1 + memoryview(request.texts).nbytes + len(getattr(request, "query", ""))
    options = 0 if request.template_kwargs is UNSET else memoryview(request.template_kwargs).nbytes
    texts = (request.prompt or "", request.suffix, request.prediction, *request.stop)
    form = 0 if request.form is None else len(request.form.text)
    # The token ids of a prompt are only compared and copied.
    return 1 + packed_bytes(request) + options + form + sum(map(len, texts)) + len(request.tokens or ())


class PreparationQueue:
    """The requests in preparation: those that wait, and those that have a thread."""

    def __init__(self) -> None:
        self._turns: dict[bool, OrderedDict[str, list[QueueEntry]]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        """Those that wait, by whether they are short, then by client, in the order of the clients' turns."""
        self._waiting: dict[str, QueueEntry] = {}
        self._running: dict[str, QueueEntry] = {}
        self._nbytes = 0
        self._started = self._refused = self._cancelled = 0
        self._waited_s = 0.0

    def __len__(self) -> int:
        """Return the number of requests that wait or have a thread."""
        return len(self._running) + len(self._waiting)

    def add(self, entry: QueueEntry) -> None:
        """Add a request. Raises `RequestError(text_generation_busy)` if there is no room for it."""
        size = len(self)
        if size and (size >= REQUESTS_MAX or self._nbytes + entry.nbytes > BYTES_MAX):
            self._refused += 1
            message = (
                f"The model's tokenizer has {size} requests of {self._nbytes} bytes in progress and no room "
                f"for one of {entry.nbytes} bytes. Retry later."
            )
            raise RequestError(Code.TEXT_GENERATION_BUSY, message, retry_after_s=1.0)
        self._turns[entry.is_short].setdefault(entry.client, []).append(entry)
        self._waiting[entry.id] = entry
        self._nbytes += entry.nbytes

    def take(self, now: float, *, short_only: bool) -> QueueEntry | None:
        """Return the next request, which has a thread from now on; None: there is none for this lane."""
        for is_short in (True,) if short_only else (False, True):
            if clients := self._turns[is_short]:
                client = next(iter(clients))
                entry = min(clients[client], key=lambda entry: entry.rank)
                self._remove(entry)
                if client in clients:
                    clients.move_to_end(client)
                self._running[entry.id] = entry
                self._started += 1
                self._waited_s += max(0.0, now - entry.arrived_at)
                return entry
        return None

    def finish(self, id: str) -> None:
        """Remove a request that had a thread. Idempotent."""
        if entry := self._running.pop(id, None):
            self._nbytes -= entry.nbytes

    def cancel(self, id: str) -> bool:
        """Cancel a request; return whether it was waiting, and so has left the queue."""
        if id in self._running:
            self._cancelled += 1
            return False
        entry = self._waiting.get(id)
        if entry is None:
            return False
        self._remove(entry)
        self._nbytes -= entry.nbytes
        self._cancelled += 1
        return True

    def status(self, now: float) -> PreparationStatus:
        """Return the statistics for a heartbeat."""
        oldest = min((entry.arrived_at for entry in self._waiting.values()), default=now)
        return PreparationStatus(
            waiting=len(self._waiting),
            running=len(self._running),
            bytes=self._nbytes,
            oldest_s=max(0.0, now - oldest),
            started=self._started,
            waited_s=self._waited_s,
            refused=self._refused,
            cancelled=self._cancelled,
        )

    def _remove(self, entry: QueueEntry) -> None:
        del self._waiting[entry.id]
        clients = self._turns[entry.is_short]
        clients[entry.client].remove(entry)
        if not clients[entry.client]:
            del clients[entry.client]
