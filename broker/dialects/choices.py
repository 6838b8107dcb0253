"""Renderers of one answer from a request's flights, one choice per flight: an SSE stream or a JSON document.

Shared by OpenAI's dialects; each dialect formats a choice with its own `ChoiceRenderer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

from broker.dialects.body import encode
from broker.dialects.openai import error_object, failure, timings_object, usage_object
from broker.dialects.renderers import DocumentRenderer, SseRenderer
from broker.dispatch.flight import Item, size_of
from protocol.messages import Accepted, Failed, Finished, PromptLogprobs
from protocol.types import Delta, Usage

DONE = b"data: [DONE]\n\n"

Envelope = Callable[[], dict[str, Any]]
"""Returns the fields of a response beside its choices. Called once a worker has accepted the request."""


class ChoiceRenderer(Protocol):
    """Formats choices in one dialect. Each answer has its own instance, which may keep state."""

    def add_prompt(self, choice: int, item: Accepted | PromptLogprobs) -> None:
        """Accept information about the choice's prompt."""

    def opening(self, choice: int) -> bytes:
        """Return the stream entry before any delta, as JSON; empty if there is nothing to show."""

    def gain(self, choice: int, delta: Delta) -> bytes:
        """Return the stream entry for one step's delta; empty if there is nothing to show."""

    def closing(self, choice: int, reason: str) -> bytes:
        """Return the choice's last stream entry."""

    def whole(self, choice: int, deltas: Sequence[Delta], reason: str) -> dict[str, Any]:
        """Return the choice for a document."""


class FinishTracker:
    """Tracks which choices have finished: `choices` choices in order, equally many for each prompt."""

    def __init__(self, choices: int, prompts: int) -> None:
        self._each = choices // prompts
        self._finished: list[Finished | None] = [None] * choices

    def finish(self, choice: int, finished: Finished) -> bool:
        """Record that `choice` has finished, and return whether all have."""
        self._finished[choice] = finished
        return None not in self._finished

    def reason(self, choice: int) -> str:
        finished = self._finished[choice]
        assert finished is not None
        return finished.reason

    @property
    def continued_by(self) -> str:
        """Plan that continued a choice which another plan had started; empty if there is none."""
        return next((f.continued_by for f in self._finished if f is not None and f.continued_by), "")

    def timings(self) -> dict[str, Any]:
        """Return the field `timings` of an answer of one choice, if they are known; llama.cpp sends them too,
        always and at the end."""
        [first, *others] = self._finished
        found = None if others or first is None else timings_object(first.usage, first.timings)
        return {} if found is None else {"timings": found}

    def usage(self) -> Usage:
        """Return the usage of the finished answer, each prompt counted once."""
        usages = [finished.usage for finished in self._finished if finished is not None]
        groups = [usages[first : first + self._each] for first in range(0, len(usages), self._each)]
        return Usage(
            prompt_tokens=sum(group[0].prompt_tokens for group in groups),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            # Copies of a prompt are prefilled once; tokens shared among them are no cache hit of the request.
            cached_tokens=sum(min(usage.cached_tokens for usage in group) for group in groups),
            sparse_tokens=sum(group[0].sparse_tokens for group in groups),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
            accepted_tokens=sum(usage.accepted_tokens for usage in usages),
            rejected_tokens=sum(usage.rejected_tokens for usage in usages),
        )


class ChoiceSseRenderer(SseRenderer):
    """Renders choices as server-sent events. The constant part of every chunk is rendered once."""

    def __init__(
        self,
        envelope: Envelope,
        form: ChoiceRenderer,
        *,
        choices: int,
        prompts: int = 1,
        include_usage: bool,
    ) -> None:
        """`envelope`: the fields at the beginning of every chunk; called when the first chunk is rendered."""
        super().__init__()
        self._form = form
        self._ends = FinishTracker(choices, prompts)
        self._envelope = envelope
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage

    @cached_property
    def _head(self) -> bytes:
        return b"data: " + encode(self._envelope())[:-1] + b',"choices":['

    def events(self, choice: int, item: Item) -> Iterable[bytes]:
        if not isinstance(item, Delta):
            return self._around(choice, item)
        entry = self._form.gain(choice, item)
        return (self._head, entry, self._tail) if entry else ()

    def _around(self, choice: int, item: Item) -> Iterator[bytes]:
        """Yield the events before and after a choice's deltas. Prefix hits go into the response headers."""
        match item:
            case Accepted() | PromptLogprobs():
                self._form.add_prompt(choice, item)
                entry = self._form.opening(choice)
                yield self._head + entry + self._tail if entry else self.KEEPALIVE
            case Finished():
                is_last = self._ends.finish(choice, item)
                yield self._head + self._form.closing(choice, item.reason) + self._last_tail(item)
                if is_last:
                    yield from self._close()
            case Failed():
                self.over = True
                yield b"data: " + encode(error_object(failure(item))) + b"\n\n"
                yield DONE

    def _last_tail(self, finished: Finished) -> bytes:
        """Return the tail behind a choice's last entry."""
        extra = {"continued_by": finished.continued_by} if finished.continued_by else {}
        if not self._include_usage:  # otherwise the last chunk is that of the usage
            extra |= self._ends.timings()
        return self._tail.replace(b"]", b"]," + encode(extra)[1:-1], 1) if extra else self._tail

    def _close(self) -> Iterator[bytes]:
        self.over = True
        if self._include_usage:
            extra = {"usage": usage_object(self._ends.usage()), **self._ends.timings()}
            yield self._head + b"]," + encode(extra)[1:] + b"\n\n"
        yield DONE


class ChoiceDocumentRenderer(DocumentRenderer):
    """Renders choices as one JSON document."""

    def __init__(self, envelope: Envelope, form: ChoiceRenderer, *, choices: int, prompts: int = 1) -> None:
        """`envelope`: the fields beside choices and usage; called when the document is rendered."""
        super().__init__()
        self._envelope = envelope
        self._form = form
        self._ends = FinishTracker(choices, prompts)
        self._deltas: list[list[Delta]] = [[] for _ in range(choices)]

    def collect(self, choice: int, item: Item) -> None:
        match item:
            case Delta():
                self.count(size_of(item))
                self._deltas[choice].append(item)
            case Accepted() | PromptLogprobs():
                self._form.add_prompt(choice, item)
            case Finished():
                self.over = self._ends.finish(choice, item)

    def document(self) -> bytes:
        choices = [
            self._form.whole(choice, deltas, self._ends.reason(choice))
            for choice, deltas in enumerate(self._deltas)
        ]
        document = self._envelope() | {"choices": choices, "usage": usage_object(self._ends.usage())}
        document |= self._ends.timings()
        if self._ends.continued_by:
            document["continued_by"] = self._ends.continued_by
        return encode(document)
