"""OpenAI chat completions: body -> Generate, and a flight's items -> SSE chunks or one JSON document."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from broker.dialects.body import encode, encode_text
from broker.dialects.chat_body import Asked, Body
from broker.dialects.openai import error_object, failure, usage_object
from broker.inflight import Item
from broker.normalize import Conversation, normalize
from protocol.messages import Accepted, Delta, Failed, Finished, Generate, Media, Sampling

SEED_MASK = 2**63 - 1

# --- to the worker -----------------------------------------------------------------------------------


def conversation(asked: Asked, *, system_in_place: bool) -> Conversation:
    """The canonical conversation of a checked request."""
    messages: list[dict[str, Any]] = msgspec.to_builtins(asked.body.messages)
    return normalize(messages, system_in_place=system_in_place)


def generate(
    asked: Asked, messages: list[dict[str, Any]], media: list[Media], *, id: str, incarnation: str
) -> Generate:
    """The message to the worker. A request without a seed gets one here, so that it can be repeated."""
    body = asked.body
    kwargs = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        kwargs.setdefault("enable_thinking", body.enable_thinking)
    seed = secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK
    return Generate(
        incarnation=incarnation,
        id=id,
        sampling=Sampling(
            seed=seed,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=None if body.top_k is None else max(body.top_k, 0),
            min_p=body.min_p,
        ),
        messages=messages,
        tools=_offered_tools(body),
        template_kwargs=kwargs,
        media=media,
        stop=asked.stop,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        ignore_eos=bool(body.ignore_eos),
    )


def _offered_tools(body: Body) -> list[dict[str, Any]] | None:
    if body.tool_choice == "none" or not body.tools:
        return None
    offered = []
    for tool in body.tools:
        if tool.type == "function" and tool.function is not None:
            function = {"name": tool.function.name}
            fields = {"description": tool.function.description, "parameters": tool.function.parameters}
            offered.append(
                {
                    "type": "function",
                    "function": function | {k: v for k, v in fields.items() if v is not None},
                }
            )
    return offered or None


# --- to the client -----------------------------------------------------------------------------------


DONE = b"data: [DONE]\n\n"


class Stream:
    """A flight's items -> server-sent events. The constant part of every chunk is rendered once."""

    content_type = b"text/event-stream; charset=utf-8"
    keepalive = b": keep-alive\n\n"

    def __init__(self, *, id: str, model: str, created: int, include_usage: bool) -> None:
        envelope = encode({"id": id, "object": "chat.completion.chunk", "created": created, "model": model})
        self._head = b"data: " + envelope[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._delta_head = self._head + b'{"index":0,"delta":{"content":'
        self._delta_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._include_usage = include_usage
        self._begun = False

    def feed(self, items: Sequence[Item]) -> bytes:
        """The events of `items`, in order. An error is an event only once something has been sent."""
        if not self._begun and items and isinstance(items[-1], Failed):
            raise failure(items[-1])
        events = b"".join(event for item in items for event in self._events(item))
        self._begun = self._begun or bool(events)
        return events

    def _events(self, item: Item) -> Iterator[bytes]:
        match item:
            case Delta():
                if item.text:
                    yield self._delta_head + encode_text(item.text) + self._delta_tail
            case Accepted():
                yield self._chunk({"role": "assistant", "content": ""}, None)
            case Finished():
                yield self._chunk({}, item.reason)
                if self._include_usage:
                    yield self._head + b'],"usage":' + encode(usage_object(item.usage)) + b"}\n\n"
                yield DONE
            case Failed():
                yield b"data: " + encode(error_object(failure(item))) + b"\n\n"
                yield DONE

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._head + encode(choice) + self._tail


class Whole:
    """A flight's items -> one JSON document."""

    content_type = b"application/json"
    keepalive = b""

    def __init__(self, *, id: str, model: str, created: int) -> None:
        self._envelope = {"id": id, "object": "chat.completion", "created": created, "model": model}
        self._text: list[str] = []

    def feed(self, items: Sequence[Item]) -> bytes:
        """The document once it is complete, nothing before."""
        for item in items:
            match item:
                case Delta():
                    self._text.append(item.text)
                case Finished():
                    return self._document(item)
                case Failed():
                    raise failure(item)
        return b""

    def _document(self, finished: Finished) -> bytes:
        message = {"role": "assistant", "content": "".join(self._text), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finished.reason}
        return encode(self._envelope | {"choices": [choice], "usage": usage_object(finished.usage)})
