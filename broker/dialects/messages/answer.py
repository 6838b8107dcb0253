"""What a flight brings -> one message: a stream of typed events, or the document that they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from broker.dialects.answer import DOCUMENT_BYTES_MAX, failure_in
from broker.dialects.body import encode, encode_text
from broker.dialects.messages.arguments import object_of
from broker.dialects.messages.blocks import Blocks, Closed, Event, Grown, Kind, Opened
from broker.dialects.messages.errors import error_object
from broker.dialects.openai import failure
from broker.dispatch.flight import Batch, Item, size_of
from protocol.errors import Code, RequestError
from protocol.messages import Accepted, Failed, Finished, Reused
from protocol.parts import Delta, Usage

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"'
_GROWN = {
    Kind.TEXT: _DELTA + b'text_delta","text":%b}}\n\n',
    Kind.THINKING: _DELTA + b'thinking_delta","thinking":%b}}\n\n',
    Kind.SIGNATURE: _DELTA + b'signature_delta","signature":%b}}\n\n',
    Kind.TOOL_USE: _DELTA + b'input_json_delta","partial_json":%b}}\n\n',
}


class Stream:
    """Items -> server-sent events. The first is `message_start`, unless somebody has waited long for a
    worker."""

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self, message: dict[str, Any], request_id: str = "") -> None:
        """`message`: as it begins. `request_id`: for errors."""
        self.over = False
        self._message = message
        self._request_id = request_id
        self._begun = False
        self._blocks = Blocks()
        self._index = -1
        self._prompt: Usage | None = None
        """What is known of it before the message starts."""
        self._started = False

    def wait(self) -> bytes:
        """An event that says nothing."""
        self._begun = True
        return PING

    def feed(self, batches: Sequence[Batch]) -> bytes:
        """The events of all items, in order. An error is an event only once something has been sent."""
        if not self._begun and (error := failure_in(batches)):
            raise error
        events: list[bytes] = []
        for item in _items(batches):
            if not self.over:
                events += self._events(item)
        if self._prompt is not None and not self.over:
            events += self._start()  # of what is reused no more was told in time
        self._begun = self._begun or bool(events)
        return b"".join(events)

    def _events(self, item: Item) -> Iterator[bytes]:
        match item:
            case Accepted():
                self._prompt = Usage(prompt_tokens=item.prompt_tokens, completion_tokens=0)
            case Reused() if self._prompt is not None:
                count, cached = self._prompt.prompt_tokens, item.reuse.tokens
                self._prompt = Usage(prompt_tokens=count, completion_tokens=0, cached_tokens=cached)
            case Delta():
                yield from self._start()
                yield from map(self._render, self._blocks.take(item))
            case Finished():
                yield from self._start()
                yield from map(self._render, self._blocks.close())
                yield from self._finish(item)
            case Failed():
                self.over = True
                yield _event("error", error_object(failure(item), self._request_id))

    def _start(self) -> Iterator[bytes]:
        if self._started:
            return
        self._started = True
        usage = usage_object(self._prompt or Usage(prompt_tokens=0, completion_tokens=0))
        begun = self._message | {"usage": usage}
        yield _event("message_start", {"type": "message_start", "message": begun})
        yield PING

    def _finish(self, finished: Finished) -> Iterator[bytes]:
        self.over = True
        told = {"delta": _ending(finished), "usage": usage_object(finished.usage)}
        yield _event("message_delta", {"type": "message_delta", **told})
        yield _event("message_stop", {"type": "message_stop"})

    def _render(self, event: Event) -> bytes:
        match event:
            case Grown(kind, text):
                return _GROWN[kind] % (self._index, encode_text(text))
            case Opened():
                self._index += 1
                place = {"index": self._index, "content_block": _opened(event)}
                return _event("content_block_start", {"type": "content_block_start", **place})
            case Closed():
                stop = {"type": "content_block_stop", "index": self._index}
                return _event("content_block_stop", stop)


class Whole:
    """Items -> one JSON document."""

    content_type = b"application/json"

    def __init__(self, message: dict[str, Any]) -> None:
        """`message`: as it begins."""
        self.over = False
        self._message = message
        self._blocks = Blocks()
        self._content: list[tuple[Opened, list[Grown]]] = []
        self._bytes = 0

    def wait(self) -> bytes:
        """Nothing: it comes in one piece."""
        return b""

    def feed(self, batches: Sequence[Batch]) -> bytes:
        """The document once it is complete, nothing before."""
        if error := failure_in(batches):
            raise error
        for item in _items(batches):
            match item:
                case Delta():
                    self._count(item)
                    self._collect(self._blocks.take(item))
                case Finished():
                    self.over = True
                    self._collect(self._blocks.close())
                    return self._document(item)
        return b""

    def _count(self, delta: Delta) -> None:
        self._bytes += size_of(delta)
        if self._bytes > DOCUMENT_BYTES_MAX:
            message = f"The answer has grown beyond {DOCUMENT_BYTES_MAX} bytes: ask for a stream."
            raise RequestError(Code.ENGINE_ERROR, message)

    def _collect(self, events: Iterator[Event]) -> None:
        for event in events:
            match event:
                case Opened():
                    self._content.append((event, []))
                case Grown():
                    self._content[-1][1].append(event)

    def _document(self, finished: Finished) -> bytes:
        document = {
            **self._message,
            "content": [_whole(opened, gains) for opened, gains in self._content],
            **_ending(finished),
            "usage": usage_object(finished.usage),
        }
        return encode(document)


def usage_object(usage: Usage) -> dict[str, Any]:
    """What of the prompt was found stored is counted apart; storing the rest costs nobody anything."""
    document: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.sparse_tokens:
        document["sparse_tokens"] = usage.sparse_tokens
    if usage.reasoning_tokens:
        document["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return document


def _items(batches: Sequence[Batch]) -> Iterator[Item]:
    """Of the one flight that there is."""
    return (item for _, items in batches for item in items)


def _event(name: str, document: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(document))


def message(id: str, model: str) -> dict[str, Any]:
    """One that has only begun."""
    whose = {"id": id, "type": "message", "role": "assistant", "model": model}
    return {**whose, "content": [], "stop_reason": None, "stop_sequence": None}


def _ending(finished: Finished) -> dict[str, Any]:
    """Whole calls count more than the stop string behind them: they are to be carried out."""
    stopped = finished.reason == "stop" and finished.stop
    reason = "stop_sequence" if stopped else _REASONS.get(finished.reason, "end_turn")
    ending = {"stop_reason": reason, "stop_sequence": finished.stop if stopped else None}
    return ending | ({"continued_by": finished.continued_by} if finished.continued_by else {})


def _opened(block: Opened) -> dict[str, Any]:
    match block.kind:
        case Kind.TOOL_USE:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
        case Kind.THINKING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case _:
            return {"type": "text", "text": ""}


def _whole(opened: Opened, gains: Sequence[Grown]) -> dict[str, Any]:
    texts = {kind: "".join(gain.text for gain in gains if gain.kind is kind) for kind in Kind}
    block = _opened(opened)
    match opened.kind:
        case Kind.TOOL_USE:
            return block | {"input": object_of(texts[Kind.TOOL_USE])}
        case Kind.THINKING:
            return block | {"thinking": texts[Kind.THINKING], "signature": texts[Kind.SIGNATURE]}
        case _:
            return block | {"text": texts[Kind.TEXT]}
