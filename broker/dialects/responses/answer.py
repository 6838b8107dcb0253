"""What a flight brings -> one response: a stream of typed events, or the document that they end with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from broker.dialects.answer import DOCUMENT_BYTES_MAX, KEEPALIVE, failure_in
from broker.dialects.body import encode
from broker.dialects.openai import error_object, failure
from broker.dialects.responses.output import Event, Output
from broker.dispatch.flight import Batch, Item, size_of
from protocol.errors import Code, RequestError
from protocol.messages import Failed, Finished
from protocol.parts import Delta, Usage

Document = dict[str, Any]


class Answer:
    """One response as it comes about. `document`: once it is over. `error`: what it has failed with.

    `keep` is called with it before anybody is told that it is over: who hears that may go on from it at once.
    What has failed is not kept: there is nothing to go on from.
    """

    def __init__(
        self,
        envelope: Document,
        output: Output,
        *,
        clock: Callable[[], float],
        keep: Callable[[Document], None] | None = None,
    ) -> None:
        """`envelope`: what is known of the response before its answer."""
        self.document: Document | None = None
        self.error: RequestError | None = None
        self._envelope = envelope
        self._output = output
        self._clock = clock
        self._keep = keep
        self._bytes = 0
        self._is_open = False
        self._unsaid: list[Event] = []

    def so_far(self) -> Document:
        """Its document as it is, or as it was when it began."""
        return self.document or self._envelope | {"status": "in_progress"}

    def cancel(self) -> Document:
        """Somebody wants no more of it. What is left to be told of that comes from `unsaid`."""
        if self.document is None:
            self._unsaid = [*self._open(), *self._output.close(complete=False)]
            self._unsaid.append(self._end("incomplete", status="cancelled"))
        return self.so_far()

    def unsaid(self) -> Iterator[Event]:
        """How a response ends that was cancelled; once."""
        unsaid, self._unsaid = self._unsaid, []
        yield from unsaid

    def take(self, item: Item) -> Iterator[Event]:
        """What is to be told of it; nothing more once the response is over."""
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

    def _open(self) -> Iterator[Event]:
        if not self._is_open:
            self._is_open = True
            begun = self._envelope | {"status": "in_progress"}
            yield {"type": "response.created", "response": begun}
            yield {"type": "response.in_progress", "response": begun}

    def _grow(self, delta: Delta) -> Iterator[Event]:
        self._bytes += size_of(delta)
        if self._bytes > DOCUMENT_BYTES_MAX:
            message = f"The answer has grown beyond {DOCUMENT_BYTES_MAX} bytes."
            yield from self._fail(RequestError(Code.ENGINE_ERROR, message))
        else:
            yield from self._output.take(delta)

    def _finish(self, finished: Finished) -> Iterator[Event]:
        complete = finished.reason != "length"
        yield from self._output.close(complete=complete)
        told: dict[str, Any] = {"usage": usage_object(finished.usage)}
        if finished.continued_by:
            told["continued_by"] = finished.continued_by
        if complete:
            yield self._end("completed", completed_at=int(self._clock()), **told)
        else:
            yield self._end("incomplete", incomplete_details={"reason": "max_output_tokens"}, **told)

    def _fail(self, error: RequestError) -> Iterator[Event]:
        """With an error, told twice: SDKs raise the first event, agents look at the second."""
        self.error = error
        told = error_object(error)["error"]
        flat = {name: told[name] for name in ("code", "message", "param")}
        yield {"type": "error", **flat, "error": told}
        yield self._end("failed", error={"code": told["code"], "message": told["message"]})

    def _end(self, how: str, **told: Any) -> Event:
        self.document = self._envelope | {"status": how, "output": self._output.items, **told}
        if self._keep is not None and self.error is None:
            self._keep(self.document)
        return {"type": f"response.{how}", "response": self.document}


class Stream:
    """Items -> server-sent events, numbered from 0."""

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self, answer: Answer) -> None:
        self.over = False
        self._answer = answer
        self._begun = False
        self._events = 0

    def wait(self) -> bytes:
        """A comment; of a response that was cancelled, its end."""
        self._begun = True
        return self._render(self._answer.unsaid()) or KEEPALIVE

    def feed(self, batches: Sequence[Batch]) -> bytes:
        """The events of all items, in order. An error is an event only once something has been sent."""
        if not self._begun and (error := failure_in(batches)):
            raise error
        return self._render(e for _, items in batches for item in items for e in self._answer.take(item))

    def _render(self, events: Iterator[Event]) -> bytes:
        rendered = b"".join(map(self._event, events))
        self._begun = self._begun or bool(rendered)
        self.over = self._answer.document is not None
        return rendered

    def _event(self, event: Event) -> bytes:
        event["sequence_number"] = self._events
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


class Whole:
    """Items -> one JSON document."""

    content_type = b"application/json"

    def __init__(self, answer: Answer) -> None:
        self.over = False
        self._answer = answer

    def wait(self) -> bytes:
        """Nothing, as it comes in one piece; unless the response was cancelled."""
        return self._document()

    def feed(self, batches: Sequence[Batch]) -> bytes:
        """The document once it is complete, nothing before."""
        for _, items in batches:
            for item in items:
                for _ in self._answer.take(item):
                    pass  # the document has what the events say
        if self._answer.error is not None:
            raise self._answer.error
        return self._document()

    def _document(self) -> bytes:
        document = self._answer.document
        self.over = document is not None
        return encode(document) if document is not None else b""


def usage_object(usage: Usage) -> dict[str, Any]:
    """What is written into the cache is not counted apart, as nobody is asked to pay for it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
