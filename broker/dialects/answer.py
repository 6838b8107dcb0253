"""What the flights of one request bring -> one answer, a choice for each: a stream or a document.

Written once for OpenAI's dialects; how a choice looks is a `Form`, theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from broker.dialects.body import encode
from broker.dialects.openai import error_object, failure, usage_object
from broker.dispatch.flight import Batch, size_of
from protocol.errors import Code, RequestError
from protocol.messages import Accepted, Encoded, Failed, Finished, Reused, Scored
from protocol.parts import Delta, Usage

DOCUMENT_BYTES_MAX = 256 * 2**20
"""Of what is collected for one document, in memory: far beyond any text, and reports of likelihoods on 60,000
tokens. A stream has no such limit."""
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"


class Form(Protocol):
    """How one dialect writes a choice. One for each answer: it may count as it goes."""

    def hear(self, choice: int, item: Accepted | Scored) -> None:
        """What is said of the choice's prompt."""

    def opening(self, choice: int) -> bytes:
        """An entry of a stream before any gain, as JSON: what was heard; empty where nothing is shown."""

    def gain(self, choice: int, delta: Delta) -> bytes:
        """The entry for what a step brought; empty where it brought nothing to show."""

    def closing(self, choice: int, reason: str) -> bytes:
        """The choice's last entry in a stream."""

    def whole(self, choice: int, deltas: Sequence[Delta], reason: str) -> dict[str, Any]:
        """The choice in a document."""


class Ends:
    """Which choices have finished, and how: `prompts` prompts with equally many choices each, in order."""

    def __init__(self, choices: int, prompts: int) -> None:
        self._each = choices // prompts
        self._finished: list[Finished | None] = [None] * choices

    def finish(self, choice: int, finished: Finished) -> bool:
        """Whether that was the last one."""
        self._finished[choice] = finished
        return None not in self._finished

    def reason(self, choice: int) -> str:
        finished = self._finished[choice]
        assert finished is not None
        return finished.reason

    @property
    def continued_by(self) -> str:
        """The plan that went on with what another one had begun, of some choice; empty: there is none."""
        return next((f.continued_by for f in self._finished if f is not None and f.continued_by), "")

    def usage(self) -> Usage:
        """Of a finished answer: each prompt is counted once."""
        usages = [finished.usage for finished in self._finished if finished is not None]
        groups = [usages[first : first + self._each] for first in range(0, len(usages), self._each)]
        return Usage(
            prompt_tokens=sum(group[0].prompt_tokens for group in groups),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            # The copies of a prompt are prefilled once: what they share is no cache hit of the request's.
            cached_tokens=sum(min(usage.cached_tokens for usage in group) for group in groups),
            sparse_tokens=sum(group[0].sparse_tokens for group in groups),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
            accepted_tokens=sum(usage.accepted_tokens for usage in usages),
            rejected_tokens=sum(usage.rejected_tokens for usage in usages),
        )


class Stream:
    """Items -> server-sent events. The constant part of every chunk is rendered once."""

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(
        self, envelope: dict[str, Any], form: Form, *, choices: int, prompts: int = 1, include_usage: bool
    ) -> None:
        """`envelope`: what every chunk begins with."""
        self.over = False
        self._form = form
        self._ends = Ends(choices, prompts)
        self._head = b"data: " + encode(envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage
        self._begun = False

    def wait(self) -> bytes:
        """A comment."""
        self._begun = True
        return KEEPALIVE

    def feed(self, batches: Sequence[Batch]) -> bytes:
        """The events of all items, in order. An error is an event only once something has been sent."""
        if not self._begun and (error := failure_in(batches)):
            raise error
        events: list[bytes] = []
        for choice, items in batches:
            for item in items:
                if self.over:
                    break
                if not isinstance(item, Delta):
                    events += self._events(choice, item)
                elif entry := self._form.gain(choice, item):
                    events += (self._head, entry, self._tail)
        self._begun = self._begun or bool(events)
        return b"".join(events)

    def _events(
        self, choice: int, item: Accepted | Reused | Scored | Encoded | Finished | Failed
    ) -> Iterator[bytes]:
        match item:
            case Accepted() | Scored():
                self._form.hear(choice, item)
                entry = self._form.opening(choice)
                yield self._head + entry + self._tail if entry else KEEPALIVE
            case Reused() | Encoded():
                pass  # the one is said in the response's headers, the other never of a text that goes on
            case Finished():
                yield self._head + self._form.closing(choice, item.reason) + self._last_tail(item)
                if self._ends.finish(choice, item):
                    yield from self._close()
            case Failed():
                self.over = True
                yield b"data: " + encode(error_object(failure(item))) + b"\n\n"
                yield DONE

    def _last_tail(self, finished: Finished) -> bytes:
        """Behind a choice's last entry."""
        if not finished.continued_by:
            return self._tail
        return self._tail.replace(b"]", b'],"continued_by":' + encode(finished.continued_by), 1)

    def _close(self) -> Iterator[bytes]:
        self.over = True
        if self._include_usage:
            yield self._head + b'],"usage":' + encode(usage_object(self._ends.usage())) + b"}\n\n"
        yield DONE


class Whole:
    """Items -> one JSON document."""

    content_type = b"application/json"

    def __init__(self, envelope: dict[str, Any], form: Form, *, choices: int, prompts: int = 1) -> None:
        """`envelope`: what stands beside choices and usage."""
        self.over = False
        self._envelope = envelope
        self._form = form
        self._ends = Ends(choices, prompts)
        self._deltas: list[list[Delta]] = [[] for _ in range(choices)]
        self._bytes = 0

    def wait(self) -> bytes:
        """Nothing: it comes in one piece."""
        return b""

    def feed(self, batches: Sequence[Batch]) -> bytes:
        """The document once it is complete, nothing before."""
        if error := failure_in(batches):
            raise error
        for choice, items in batches:
            for item in items:
                match item:
                    case Delta():
                        self._collect(choice, item)
                    case Accepted() | Scored():
                        self._form.hear(choice, item)
                    case Finished():
                        self.over = self._ends.finish(choice, item)
        return self._document() if self.over else b""

    def _collect(self, choice: int, delta: Delta) -> None:
        self._bytes += size_of(delta)
        if self._bytes > DOCUMENT_BYTES_MAX:
            message = f"The answer has grown beyond {DOCUMENT_BYTES_MAX} bytes: ask for a stream."
            raise RequestError(Code.ENGINE_ERROR, message)
        self._deltas[choice].append(delta)

    def _document(self) -> bytes:
        choices = [
            self._form.whole(choice, deltas, self._ends.reason(choice))
            for choice, deltas in enumerate(self._deltas)
        ]
        document = self._envelope | {"choices": choices, "usage": usage_object(self._ends.usage())}
        if self._ends.continued_by:
            document["continued_by"] = self._ends.continued_by
        return encode(document)


def failure_in(batches: Sequence[Batch]) -> RequestError | None:
    """Of the first flight among them that has failed."""
    for _, items in batches:
        if items and isinstance(last := items[-1], Failed):
            return failure(last)
    return None
