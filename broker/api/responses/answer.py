"""Renderers of one response from a flight: a stream of typed events, or the final document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from broker.api.responses.output import Event, ResponseOutput
from broker.dialects.body import encode
from broker.dialects.openai import error_object, failure
from broker.dialects.renderers import DocumentRenderer, SseRenderer, oversize, typed_event
from broker.dispatch.flight import Batch, Item, size_of
from protocol.errors import RequestError
from protocol.messages import Failed, Finished
from protocol.types import Delta, Usage

Document = dict[str, Any]


class ResponseBuilder:
    """Builder of one response. `document`: set once it is over. `error`: set if it failed. `on_cancel`:
    called when it is cancelled.

    `keep` is called with the document before the end is reported, because a client may continue from it at
    once. A failed response is not stored.
    """

    def __init__(
        self,
        envelope: Document,
        output: ResponseOutput,
        *,
        clock: Callable[[], float],
        keep: Callable[[Document], None] | None = None,
        in_background: bool = False,
    ) -> None:
        """`envelope`: the response before its output. `in_background`: it is queued first, and kept even if
        it fails."""
        self.document: Document | None = None
        self.error: RequestError | None = None
        self.on_cancel: Callable[[], None] = lambda: None
        self._envelope = envelope
        self._output = output
        self._clock = clock
        self._keep = keep
        self._bytes = 0
        self._is_open = False
        self._is_queued = self._keeps_failures = in_background
        self._unsaid: list[Event] = []

    @property
    def _begun(self) -> Document:
        """Its initial state."""
        return self._envelope | {"status": "queued" if self._is_queued else "in_progress"}

    def so_far(self) -> Document:
        """Return the document, or its initial state while in progress."""
        return self.document or self._begun

    def cancel(self) -> Document:
        """Cancel the response and return its document. The remaining events are returned by `unsaid`."""
        if self.document is None:
            self._unsaid = [*self._open(), *self._output.close(complete=False)]
            self._unsaid.append(self._end("incomplete", status="cancelled"))
            self.on_cancel()
        return self.so_far()

    def unsaid(self) -> Iterator[Event]:
        """Yield the final events of a cancelled response, once."""
        unsaid, self._unsaid = self._unsaid, []
        yield from unsaid

    def opening(self) -> list[Event]:
        """Return the first events of the response, once."""
        return list(self._announce())

    def progress(self) -> Event:
        """Return the event that only says that the response is queued or in progress."""
        return {"type": f"response.{self._begun['status']}", "response": self._begun}

    def take(self, item: Item) -> Iterator[Event]:
        """Yield the events of one item; nothing more once the response is over."""
        if self.document is not None:
            yield from self.unsaid()
            return
        yield from self._open()
        match item:
            case Delta():
                yield from self._grow(item)
            case Finished():
                yield from self._finish(item)
            case Failed():
                yield from self._fail(failure(item))

    def _announce(self) -> Iterator[Event]:
        if not self._is_open:
            self._is_open = True
            yield {"type": "response.created", "response": self._begun}
            yield self.progress()

    def _open(self) -> Iterator[Event]:
        yield from self._announce()
        if self._is_queued:
            self._is_queued = False
            yield self.progress()

    def _grow(self, delta: Delta) -> Iterator[Event]:
        self._bytes += size_of(delta)
        if error := oversize(self._bytes):
            yield from self._fail(error)
        else:
            yield from self._output.take(delta)

    def _finish(self, finished: Finished) -> Iterator[Event]:
        yield from self._output.close(complete=finished.reason != "length")
        complete = finished.reason != "length" and not self._output.is_broken
        fields: dict[str, Any] = {"usage": usage_object(finished.usage)}
        if finished.continued_by:
            fields["continued_by"] = finished.continued_by
        if complete:
            yield self._end("completed", completed_at=int(self._clock()), **fields)
        else:
            yield self._end("incomplete", incomplete_details={"reason": "max_output_tokens"}, **fields)

    def _fail(self, error: RequestError) -> Iterator[Event]:
        """Yield the error as two events: SDKs raise the first, agents read the second."""
        self.error = error
        document = error_object(error)["error"]
        flat = {name: document[name] for name in ("code", "message", "param")}
        yield {"type": "error", **flat, "error": document}
        yield self._end("failed", error={"code": document["code"], "message": document["message"]})

    def _end(self, how: str, **fields: Any) -> Event:
        self.document = self._envelope | {"status": how, "output": self._output.items, **fields}
        if self._keep is not None and (self.error is None or self._keeps_failures):
            self._keep(self.document)
        return {"type": f"response.{how}", "response": self.document}


class ResponseSseRenderer(SseRenderer):
    """Renders items as server-sent events, numbered from 0.

    A keepalive is an event as well, because Codex's idle timer ignores SSE comments. It repeats the number of
    the event before it: so the numbers of all other events depend on the output alone, never on the time, and
    a client that asks for the events after its last one misses none. Without a number, OpenAI's SDKs fail.
    """

    def __init__(self, answer: ResponseBuilder) -> None:
        super().__init__()
        self._answer = answer
        self._events = 0

    def events(self, choice: int, item: Item) -> Iterator[bytes]:
        return map(self._event, self._answer.take(item))

    def pending(self) -> Iterator[bytes]:
        """Yield the final events of a cancelled response."""
        yield from map(self._event, self._answer.unsaid())
        self.over = self._answer.document is not None

    def due(self) -> bytes:
        """Return the pending events, or the first ones."""
        self._begun = True
        return b"".join([*self.pending(), *map(self._event, self._answer.opening())])

    def keepalive(self) -> bytes:
        """Return an event with the number of the last one."""
        return typed_event(self._answer.progress() | {"sequence_number": self._events - 1})

    def _event(self, event: Event) -> bytes:
        event["sequence_number"] = self._events
        self._events += 1
        return typed_event(event)


class ResponseDocumentRenderer(DocumentRenderer):
    """Renders items as one JSON document."""

    def __init__(self, answer: ResponseBuilder) -> None:
        super().__init__()
        self._answer = answer

    def collect(self, choice: int, item: Item) -> None:
        for _ in self._answer.take(item):
            pass  # the document contains what the events report

    def error(self, batches: Sequence[Batch]) -> RequestError | None:
        return self._answer.error  # a response that was cancelled before its flight failed has none

    def due(self) -> bytes:
        """Return the document, which may have been cancelled meanwhile; nothing before."""
        self.over = self._answer.document is not None
        return super().due()

    def document(self) -> bytes:
        return encode(self._answer.document)


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage. Cache writes are free and reported as 0."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
