"""Base renderers of all dialects: a stream of server-sent events, and one JSON document.

Both implement `Renderer`. A dialect says what becomes of an item, and of the whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from broker.dialects.body import encode
from broker.dialects.openai import failure
from broker.dispatch.flight import Batch, Item
from protocol.errors import Code, RequestError
from protocol.messages import Failed

DOCUMENT_BYTES_MAX = 256 * 2**20
"""Maximum size in memory of one document's items: far beyond any text, and logprobs of 60,000 tokens. Streams
have no such limit."""


class Renderer(Protocol):
    """The output half of a dialect: converts outputs of a request's flights to bytes of the body.

    `feed` returns the bytes to send now, possibly empty. It raises `RequestError` when a flight failed before
    anything was sent. When `over` is true it has returned everything.
    """

    content_type: bytes
    over: bool

    def due(self) -> bytes:
        """Return the part of the body that is due without further output, possibly empty."""

    def keepalive(self) -> bytes:
        """Return a keepalive, which is no part of the body; empty if the format has none."""

    def feed(self, batches: Sequence[Batch]) -> bytes: ...


class SseRenderer(ABC):
    """Base renderer of server-sent events. `KEEPALIVE`: by default an SSE comment."""

    content_type = b"text/event-stream; charset=utf-8"
    KEEPALIVE = b": keep-alive\n\n"

    def __init__(self) -> None:
        self.over = False
        self._begun = False

    @abstractmethod
    def events(self, choice: int, item: Item) -> Iterable[bytes]:
        """Return the events of one item of a choice. Nothing is asked for once `over` is set."""

    def pending(self) -> Iterable[bytes]:
        """Return the events that are due after the last item, or without one."""
        return ()

    def due(self) -> bytes:
        self._begun = True
        return b"".join(self.pending())

    def keepalive(self) -> bytes:
        return self.KEEPALIVE

    def feed(self, batches: Sequence[Batch]) -> bytes:
        """Return the events of all items in order. A failure is raised if nothing was sent before."""
        if not self._begun and (error := failure_in(batches)):
            raise error
        events: list[bytes] = []
        for choice, items in batches:
            for item in items:
                if self.over:
                    break
                events += self.events(choice, item)
        events += self.pending()
        self._begun = self._begun or bool(events)
        return b"".join(events)


class DocumentRenderer(ABC):
    """Base renderer of one JSON document, whose items are collected within a size limit.

    `advice`: what the client can do about an answer that is too large.
    """

    content_type = b"application/json"
    advice = " Set 'stream' to true."

    def __init__(self) -> None:
        self.over = False
        self._bytes = 0

    @abstractmethod
    def collect(self, choice: int, item: Item) -> None:
        """Collect one item of a choice, and set `over` when the document is complete."""

    @abstractmethod
    def document(self) -> bytes:
        """Return the complete document."""

    def error(self, batches: Sequence[Batch]) -> RequestError | None:
        """Return the error of a failed flight, if any."""
        return failure_in(batches)

    def due(self) -> bytes:
        """Return the document if it is complete, else nothing: it is sent in one piece."""
        return self.document() if self.over else b""

    def keepalive(self) -> bytes:
        return b""

    def feed(self, batches: Sequence[Batch]) -> bytes:
        """Return the document once it is complete, and nothing before."""
        for choice, items in batches:
            for item in items:
                self.collect(choice, item)
        if error := self.error(batches):
            raise error
        return self.due()

    def count(self, size: int) -> None:
        """Count bytes of collected items. Raises `RequestError` if they are too many."""
        self._bytes += size
        if error := oversize(self._bytes, self.advice):
            raise error


def oversize(size: int, advice: str = "") -> RequestError | None:
    """Return the error of an answer with `size` bytes, if that is too large."""
    if size <= DOCUMENT_BYTES_MAX:
        return None
    return RequestError(Code.ENGINE_ERROR, f"The answer exceeds {DOCUMENT_BYTES_MAX} bytes.{advice}")


def failure_in(batches: Sequence[Batch]) -> RequestError | None:
    """Return the error of the first failed flight in `batches`, if any."""
    for _, items in batches:
        if items and isinstance(last := items[-1], Failed):
            return failure(last)
    return None


def typed_event(document: dict[str, Any]) -> bytes:
    """Return a server-sent event that is named by the type of its document."""
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), encode(document))
