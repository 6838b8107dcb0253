"""Output items of a response, built one after another: reasoning, messages and tool calls.

Deltas of the worker's channels become events, and the completed items are the document, so that stream and
document cannot differ. Events have no sequence number; the sender adds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from broker.api.responses.builtin_tools import CALL_ITEMS
from broker.api.responses.content import seal
from broker.dialects.custom import InputReader
from broker.dialects.logprobs import entries
from broker.dialects.tools import fields_of, is_whole
from protocol.types import CallDelta, Delta, TokenLogprob

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """Output options.

    `summarized`: send the full reasoning as its summary, since clients that ask for summaries show nothing
    else. `sealed`: also add `encrypted_content`. `namespaces`: namespace and name of each function offered
    under a flat name. `customs`, `builtins`: names of the functions for custom and built-in tools.
    `compacts`: the text is the summary of a compaction.
    """

    summarized: bool = False
    sealed: bool = False
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    customs: frozenset[str] = frozenset()
    builtins: frozenset[str] = frozenset()
    compacts: bool = False

    def call(self, name: str) -> type[_Call]:
        """Return the kind of item for calls of a function."""
        if name in self.builtins:
            return _BuiltinCall
        return _CustomCall if name in self.customs else _Call


class _Open(Protocol):
    """The item that is being built."""

    def opened(self) -> Iterator[Event]: ...

    def closed(self, status: str) -> Iterator[Event]:
        """Yield the final events; the last contains the item."""


class _Item:
    prefix = ""

    def __init__(self, stem: str, index: int) -> None:
        self.id = f"{self.prefix}_{stem}_{index}"
        self.place = {"item_id": self.id, "output_index": index}
        self._index = index

    def _added(self, item: dict[str, Any]) -> Event:
        return {"type": "response.output_item.added", "output_index": self._index, "item": item}

    def _done(self, item: dict[str, Any]) -> Event:
        return {"type": "response.output_item.done", "output_index": self._index, "item": item}


class _Message(_Item):
    prefix = "msg"

    def __init__(self, stem: str, index: int) -> None:
        super().__init__(stem, index)
        self.place["content_index"] = 0
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        fields = {"role": "assistant", "content": content}
        return {"id": self.id, "type": "message", "status": status, **fields}

    def opened(self) -> Iterator[Event]:
        yield self._added(self._item("in_progress", []))
        yield {"type": "response.content_part.added", **self.place, "part": _text_part("", [])}

    def grow(self, text: str, likelihoods: Sequence[TokenLogprob]) -> Event:
        self._texts.append(text)
        logprobs = entries(likelihoods)
        self._logprobs += logprobs
        return {"type": "response.output_text.delta", **self.place, "delta": text, "logprobs": logprobs}

    def closed(self, status: str) -> Iterator[Event]:
        text, logprobs = "".join(self._texts), self._logprobs
        part = _text_part(text, logprobs)
        yield {"type": "response.output_text.done", **self.place, "text": text, "logprobs": logprobs}
        yield {"type": "response.content_part.done", **self.place, "part": part}
        yield self._done(self._item(status, [part]))


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class _Thought(_Item):
    """Reasoning, in full or as its own summary."""

    prefix = "rs"

    def __init__(self, stem: str, index: int, style: OutputStyle) -> None:
        super().__init__(stem, index)
        self._style = style
        self._texts: list[str] = []
        if style.summarized:
            self.place["summary_index"] = 0
            self._kind, self._text_event = "summary_text", "response.reasoning_summary_text"
            self._part_event = "response.reasoning_summary_part"
        else:
            self.place["content_index"] = 0
            self._kind, self._text_event = "reasoning_text", "response.reasoning_text"
            self._part_event = "response.content_part"

    def _item(self, status: str, parts: list[dict[str, Any]], sealed: str | None) -> dict[str, Any]:
        fields = {"summary": parts} if self._style.summarized else {"summary": [], "content": parts}
        item = {"id": self.id, "type": "reasoning", "status": status, **fields}
        return item if sealed is None else item | {"encrypted_content": sealed}

    def opened(self) -> Iterator[Event]:
        yield self._added(self._item("in_progress", [], None))
        yield {"type": f"{self._part_event}.added", **self.place, "part": {"type": self._kind, "text": ""}}

    def grow(self, text: str) -> Event:
        self._texts.append(text)
        return {"type": f"{self._text_event}.delta", **self.place, "delta": text}

    def closed(self, status: str) -> Iterator[Event]:
        text = "".join(self._texts)
        part = {"type": self._kind, "text": text}
        yield {"type": f"{self._text_event}.done", **self.place, "text": text}
        yield {"type": f"{self._part_event}.done", **self.place, "part": part}
        yield self._done(self._item(status, [part], seal(text) if self._style.sealed else None))


class _Compaction(_Item):
    """Compaction with its summary, which is sent once it is complete."""

    prefix = "cmp"

    def __init__(self, stem: str, summary: str) -> None:
        super().__init__(stem, 0)
        self._summary = summary

    def _item(self, sealed: str) -> dict[str, Any]:
        return {"id": self.id, "type": "compaction", "encrypted_content": sealed}

    def opened(self) -> Iterator[Event]:
        yield self._added(self._item(""))

    def closed(self, status: str) -> Iterator[Event]:
        yield self._done(self._item(seal(self._summary)))


class _Call(_Item):
    prefix = "fc"

    def __init__(self, stem: str, index: int, call: CallDelta, style: OutputStyle) -> None:
        super().__init__(stem, index)
        self.number = call.index
        namespace, name = style.namespaces.get(call.name, ("", call.name))
        self._named = {"call_id": call.id, "name": name} | ({"namespace": namespace} if namespace else {})
        self._arguments: list[str] = []

    def _item(self, status: str, arguments: str) -> dict[str, Any]:
        fields = {**self._named, "arguments": arguments}
        return {"id": self.id, "type": "function_call", "status": status, **fields}

    def opened(self) -> Iterator[Event]:
        yield self._added(self._item("in_progress", ""))

    def grow(self, arguments: str) -> Iterator[Event]:
        self._arguments.append(arguments)
        yield {"type": "response.function_call_arguments.delta", **self.place, "delta": arguments}

    def closed(self, status: str) -> Iterator[Event]:
        arguments = "".join(self._arguments)
        status = status if is_whole(arguments) else "incomplete"
        fields = {"name": self._named["name"], "arguments": arguments}
        yield {"type": "response.function_call_arguments.done", **self.place, **fields}
        yield self._done(self._item(status, arguments))


class _CustomCall(_Call):
    """Call of a custom tool."""

    prefix = "ctc"

    def __init__(self, stem: str, index: int, call: CallDelta, style: OutputStyle) -> None:
        super().__init__(stem, index, call, style)
        self._input = InputReader()

    def _item(self, status: str, arguments: str) -> dict[str, Any]:
        fields = {**self._named, "input": arguments}
        return {"id": self.id, "type": "custom_tool_call", "status": status, **fields}

    def grow(self, arguments: str) -> Iterator[Event]:
        self._arguments.append(arguments)
        yield from self._delta(self._input.push(arguments))

    def _delta(self, text: str) -> Iterator[Event]:
        if text:
            yield {"type": "response.custom_tool_call_input.delta", **self.place, "delta": text}

    def closed(self, status: str) -> Iterator[Event]:
        yield from self._delta(self._input.close())
        text = self._input.text
        status = status if is_whole("".join(self._arguments)) else "incomplete"
        yield {"type": "response.custom_tool_call_input.done", **self.place, "input": text}
        yield self._done(self._item(status, text))


class _BuiltinCall(_Call):
    """Call of a built-in tool. Its arguments are an object, which is sent once it is complete."""

    def __init__(self, stem: str, index: int, call: CallDelta, style: OutputStyle) -> None:
        self._form = CALL_ITEMS[call.name]
        self.prefix = self._form.prefix
        super().__init__(stem, index, call, style)

    def _item(self, status: str, arguments: str) -> dict[str, Any]:
        fields = {**self._form.filled, **(fields_of(arguments) or {})}
        head = {"id": self.id, "type": f"{self._named['name']}_call", "status": status}
        return {**head, "call_id": self._named["call_id"], **self._form.beside, self._form.field: fields}

    def grow(self, arguments: str) -> Iterator[Event]:
        self._arguments.append(arguments)
        yield from ()

    def closed(self, status: str) -> Iterator[Event]:
        text = "".join(self._arguments)
        yield self._done(self._item(status if is_whole(text) else "incomplete", text))


class ResponseOutput:
    """Output state of a response. `items`: completed items, in the format of the document."""

    def __init__(self, stem: str, style: OutputStyle) -> None:
        """`stem`: the unique part of the response's id, also used in the ids of its items."""
        self.items: list[dict[str, Any]] = []
        self._stem = stem
        self._style = style
        self._open: _Open | None = None
        self._summary: list[str] = []

    def take(self, delta: Delta) -> Iterator[Event]:
        """Yield the events of one delta."""
        if self._style.compacts:
            self._summary.append(delta.text)
            return
        if delta.reasoning:
            thought = self._open
            if not isinstance(thought, _Thought):
                thought = _Thought(self._stem, self._next, self._style)
                yield from self._begin(thought)
            yield thought.grow(delta.reasoning)
        if delta.text or delta.likelihoods:
            message = self._open
            if not isinstance(message, _Message):
                message = _Message(self._stem, self._next)
                yield from self._begin(message)
            yield message.grow(delta.text, delta.likelihoods)
        for part in delta.calls:
            yield from self._called(part)

    def _called(self, part: CallDelta) -> Iterator[Event]:
        call = self._open
        if not isinstance(call, _Call) or call.number != part.index:
            call = self._style.call(part.name)(self._stem, self._next, part, self._style)
            yield from self._begin(call)
        if part.arguments:
            yield from call.grow(part.arguments)

    @property
    def _next(self) -> int:
        """Index of the next item."""
        return len(self.items) + (self._open is not None)

    def _begin(self, item: _Open) -> Iterator[Event]:
        yield from self._end("completed")
        self._open = item
        yield from item.opened()

    @property
    def is_broken(self) -> bool:
        """Whether an item is incomplete: the answer was cut, or a call broke off."""
        return any(item.get("status") == "incomplete" for item in self.items)

    def close(self, *, complete: bool) -> Iterator[Event]:
        """Yield the final events. An output without any item gets an empty message."""
        if self._style.compacts:
            yield from self._begin(_Compaction(self._stem, "".join(self._summary)))
        elif self._open is None:
            yield from self._begin(_Message(self._stem, self._next))
        yield from self._end("completed" if complete else "incomplete")

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        for event in self._open.closed(status):
            yield event
        self.items.append(event["item"])
        self._open = None
