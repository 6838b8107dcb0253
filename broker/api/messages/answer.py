"""Renderers of one message from a flight: a stream of typed events, or the equivalent document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any, NamedTuple

from msgspec import Raw

from broker.dialects.anthropic import error_object
from broker.dialects.body import encode, encode_text
from broker.dialects.openai import failure
from broker.dialects.renderers import DocumentRenderer, SseRenderer, typed_event
from broker.dialects.tools import as_text, is_whole
from broker.dispatch.flight import Item, size_of
from protocol.arguments import object_in
from protocol.messages import Accepted, Failed, Finished, PrefixHit
from protocol.types import CallDelta, Delta, Usage

# --- Content blocks from the channels of an answer: the events that streams and documents share ------
#
# A block ends when another channel continues. Whitespace alone makes no block: it is held back until its
# channel continues, and dropped if another does, since Anthropic's API would refuse it in a later request.

SIGNED = "rh1_"


class BlockKind(StrEnum):
    """Kind of a block or of a delta."""

    TEXT = "text"
    THINKING = "thinking"
    TOOL_USE = "tool_use"
    SIGNATURE = "signature"


class BlockStart(NamedTuple):
    """Start of a block. `id` and `name` are set for tool calls."""

    kind: BlockKind
    id: str = ""
    name: str = ""


class BlockDelta(NamedTuple):
    """Text for the open block: also a call's arguments, or the signature that ends a thinking block."""

    kind: BlockKind
    text: str


class BlockStop(NamedTuple):
    """End of the open block."""


Event = BlockStart | BlockDelta | BlockStop


class ContentBlocks:
    """Block state of one answer."""

    def __init__(self) -> None:
        self._open: BlockKind | None = None
        self._held = BlockDelta(BlockKind.TEXT, "")
        self._call = -1
        self._arguments: list[str] = []
        self._thought = sha256()
        self.is_broken = False
        """Whether a call broke off."""

    def take(self, delta: Delta) -> Iterator[Event]:
        """Return the events of one delta."""
        if delta.reasoning:
            yield from self._say(BlockKind.THINKING, delta.reasoning)
        if delta.text:
            yield from self._say(BlockKind.TEXT, delta.text)
        for call in delta.calls:
            yield from self._grow_call(call)

    def close(self) -> Iterator[Event]:
        """Close the open block, if any."""
        self._held = BlockDelta(BlockKind.TEXT, "")
        if self._open is BlockKind.THINKING:
            yield BlockDelta(BlockKind.SIGNATURE, SIGNED + self._thought.hexdigest())
            self._thought = sha256()
        if self._open is BlockKind.TOOL_USE:
            self.is_broken = self.is_broken or not is_whole("".join(self._arguments))
        if self._open is not None:
            self._open = None
            yield BlockStop()

    def _say(self, kind: BlockKind, text: str) -> Iterator[Event]:
        if self._open is not kind:
            text = self._held.text + text if self._held.kind is kind else text
            if text.isspace():
                self._held = BlockDelta(kind, text)
                return
            yield from self._begin(BlockStart(kind))
        if kind is BlockKind.THINKING:
            self._thought.update(text.encode())
        yield BlockDelta(kind, text)

    def _grow_call(self, call: CallDelta) -> Iterator[Event]:
        if call.index > self._call:
            self._call = call.index
            yield from self._begin(BlockStart(BlockKind.TOOL_USE, call.id, call.name))
            self._arguments = []
        if call.arguments:
            self._arguments.append(call.arguments)
            yield BlockDelta(BlockKind.TOOL_USE, call.arguments)

    def _begin(self, opened: BlockStart) -> Iterator[Event]:
        yield from self.close()
        self._open = opened.kind
        yield opened


PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"'
_GROWN = {
    BlockKind.TEXT: _DELTA + b'text_delta","text":%b}}\n\n',
    BlockKind.THINKING: _DELTA + b'thinking_delta","thinking":%b}}\n\n',
    BlockKind.SIGNATURE: _DELTA + b'signature_delta","signature":%b}}\n\n',
    BlockKind.TOOL_USE: _DELTA + b'input_json_delta","partial_json":%b}}\n\n',
}


class MessageSseRenderer(SseRenderer):
    """Renders items as server-sent events. The first is `message_start`, or a ping after a long wait."""

    KEEPALIVE = PING

    def __init__(self, message: dict[str, Any], request_id: str = "") -> None:
        """`message`: its initial state. `request_id`: for errors."""
        super().__init__()
        self._message = message
        self._request_id = request_id
        self._blocks = ContentBlocks()
        self._index = -1
        self._prompt: Usage | None = None
        """Usage of the prompt, from before the message starts."""
        self._started = False

    def events(self, choice: int, item: Item) -> Iterator[bytes]:
        match item:
            case Accepted():
                self._prompt = Usage(prompt_tokens=item.prompt_tokens, completion_tokens=0)
            case PrefixHit() if self._prompt is not None:
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
                yield typed_event(error_object(failure(item), self._request_id))

    def pending(self) -> Iterator[bytes]:
        if self._prompt is not None and not self.over:
            yield from self._start()  # a prefix hit that is not known yet is left out

    def _start(self) -> Iterator[bytes]:
        if self._started:
            return
        self._started = True
        usage = usage_object(self._prompt or Usage(prompt_tokens=0, completion_tokens=0))
        begun = self._message | {"usage": usage}
        yield typed_event({"type": "message_start", "message": begun})
        yield PING

    def _finish(self, finished: Finished) -> Iterator[bytes]:
        self.over = True
        fields = {"delta": self._ending(finished), "usage": usage_object(finished.usage)}
        yield typed_event({"type": "message_delta", **fields})
        yield typed_event({"type": "message_stop"})

    def _ending(self, finished: Finished) -> dict[str, Any]:
        """A call that broke off, and whose fragments the client has, is none: the reason says so."""
        ending = _ending(finished)
        return ending | {"stop_reason": "max_tokens"} if self._blocks.is_broken else ending

    def _render(self, event: Event) -> bytes:
        match event:
            case BlockDelta(kind, text):
                return _GROWN[kind] % (self._index, encode_text(text))
            case BlockStart():
                self._index += 1
                place = {"index": self._index, "content_block": _opened(event)}
                return typed_event({"type": "content_block_start", **place})
            case BlockStop():
                return typed_event({"type": "content_block_stop", "index": self._index})


class MessageDocumentRenderer(DocumentRenderer):
    """Renders items as one JSON document."""

    def __init__(self, message: dict[str, Any]) -> None:
        """`message`: its initial state."""
        super().__init__()
        self._message = message
        self._blocks = ContentBlocks()
        self._content: list[tuple[BlockStart, list[BlockDelta]]] = []
        self._end: dict[str, Any] = {}

    def collect(self, choice: int, item: Item) -> None:
        match item:
            case Delta():
                self.count(size_of(item))
                self._collect(self._blocks.take(item))
            case Finished():
                self.over = True
                self._collect(self._blocks.close())
                self._end = {**_ending(item), "usage": usage_object(item.usage)}

    def _collect(self, events: Iterator[Event]) -> None:
        for event in events:
            match event:
                case BlockStart():
                    self._content.append((event, []))
                case BlockDelta():
                    self._content[-1][1].append(event)

    def document(self) -> bytes:
        content = [_whole(opened, gains) for opened, gains in self._content]
        if content and self._end["stop_reason"] == "max_tokens":
            content[-1] = _whole(*self._content[-1], is_cut=True)
        return encode({**self._message, "content": content, **self._end})


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's usage. Cached tokens are counted apart; cache writes are free, hence 0."""
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


def message(id: str, model: str) -> dict[str, Any]:
    """Return the initial state of a message."""
    whose = {"id": id, "type": "message", "role": "assistant", "model": model}
    return {**whose, "content": [], "stop_reason": None, "stop_sequence": None}


def _ending(finished: Finished) -> dict[str, Any]:
    """Return the stop reason. Complete tool calls take precedence over a stop sequence behind them."""
    stopped = finished.reason == "stop" and finished.stop
    reason = "stop_sequence" if stopped else _REASONS.get(finished.reason, "end_turn")
    ending = {"stop_reason": reason, "stop_sequence": finished.stop if stopped else None}
    return ending | ({"continued_by": finished.continued_by} if finished.continued_by else {})


def _opened(block: BlockStart) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TOOL_USE:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
        case BlockKind.THINKING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case _:
            return {"type": "text", "text": ""}


def _whole(opened: BlockStart, gains: Sequence[BlockDelta], *, is_cut: bool = False) -> dict[str, Any]:
    """Return a whole block. `is_cut`: the answer was cut in it; a call then has its complete values."""
    texts = {kind: "".join(gain.text for gain in gains if gain.kind is kind) for kind in BlockKind}
    block = _opened(opened)
    match opened.kind:
        case BlockKind.TOOL_USE:
            arguments = texts[BlockKind.TOOL_USE]
            if is_whole(arguments):
                return block | {"input": Raw(arguments.encode())}
            if is_cut:
                return block | {"input": object_in(arguments, with_cut_string=False) or {}}
            return {"type": "text", "text": as_text(opened.name, arguments)}
        case BlockKind.THINKING:
            return block | {"thinking": texts[BlockKind.THINKING], "signature": texts[BlockKind.SIGNATURE]}
        case _:
            return block | {"text": texts[BlockKind.TEXT]}
