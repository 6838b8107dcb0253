"""Replay: what a worker has sent about its requests of late, to be sent again to the next gateway. Pure.

When a gateway dies, the last messages to it are lost, and its successor may know less than it did. So each
session keeps its messages about requests for a while, in the order in which they were sent, and all of them
while there is no gateway. Together they are bounded in bytes and in number; the oldest are dropped first. A
request some of whose messages were dropped is still known with the first delta that is left (`rows`).

Each step adds one entry, whatever the number of rows, and touches the record of each row in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from protocol.messages import (
    Accepted,
    EmbeddingChunk,
    Failed,
    Finished,
    PrefixHit,
    PromptLogprobs,
    StepOutputs,
)
from protocol.types import AdoptedRow, Delta, OrphanedRow, PromptToken, TokenLogprob

REPLAY_BYTES_MAX = 64 * 2**20
REPLAY_MESSAGES_MAX = 16_384
"""Steps of a minute at over two hundred tokens a second."""
REPLAY_S = 10.0
"""Age up to which messages are kept while a gateway is connected."""

_DELTA_BYTES, _LIKELY_BYTES, _CALL_BYTES = 320, 160, 160
"""Estimated memory of a plain delta, of each logprob in it, and of each tool call."""

RowMessage = Accepted | PrefixHit | PromptLogprobs | StepOutputs | EmbeddingChunk | Finished | Failed
"""A message about requests. All others describe the worker, and are made anew for each gateway."""
ROW_MESSAGES = Accepted, PrefixHit, PromptLogprobs, StepOutputs, EmbeddingChunk, Finished, Failed
"""The same for `isinstance`, which is slow for a union."""


@dataclass(slots=True)
class _Row:
    """`first`: the first delta that is left; `whole`: nothing of it was dropped."""

    deltas: int = 0
    first: int = 0
    whole: bool = True


class Replay:
    """The recent messages of one session, and the requests that they are about."""

    def __init__(self, bytes_max: int = REPLAY_BYTES_MAX, messages_max: int = REPLAY_MESSAGES_MAX) -> None:
        self._bytes_max = bytes_max
        self._messages_max = messages_max
        self._entries: deque[tuple[float, int, RowMessage]] = deque()
        """Time, estimated bytes, and message."""
        self._bytes = 0
        self._rows: dict[str, _Row] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, id: str) -> None:
        """Begin to follow a request."""
        self._rows[id] = _Row()

    def forget(self, id: str) -> None:
        """Stop to follow a request, which was cancelled."""
        self._rows.pop(id, None)

    def clear(self) -> None:
        self._entries.clear()
        self._rows.clear()
        self._bytes = 0

    def note(self, message: RowMessage, now: float) -> None:
        """Keep a message that is being sent, or would be."""
        size = 0
        if isinstance(message, StepOutputs):
            for delta in message.deltas:
                row = self._rows.get(delta.id)
                if row is not None:
                    row.deltas = delta.sequence + 1
                size += _DELTA_BYTES + len(delta.text)
                if delta.likelihoods or delta.calls or delta.reasoning:
                    size += _further_size(delta)
        else:
            if isinstance(message, EmbeddingChunk) and message.id in self._rows:
                self._rows[message.id].deltas = message.sequence + 1
            size = _size_of(message)
        self._entries.append((now, size, message))
        self._bytes += size
        while self._bytes > self._bytes_max or len(self._entries) > self._messages_max:
            self._drop_first()

    def trim(self, before: float) -> None:
        """Drop messages from before that time."""
        while self._entries and self._entries[0][0] < before:
            self._drop_first()

    def _drop_first(self) -> None:
        _, size, message = self._entries.popleft()
        self._bytes -= size
        for id, following in _reached(message):
            row = self._rows.get(id)
            if row is not None:
                row.whole = False
                row.first = max(row.first, following)
        if isinstance(message, Finished | Failed):
            self._rows.pop(message.id, None)

    def rows(self) -> list[OrphanedRow]:
        """Return the requests that run, or whose end is kept."""
        return [
            OrphanedRow(id=id, deltas=row.deltas, first=row.first, whole=row.whole)
            for id, row in self._rows.items()
        ]

    def missing(self, adopted: Mapping[str, AdoptedRow]) -> Iterator[RowMessage]:
        """Yield, in order, what a gateway that adopts these requests lacks."""
        for _, _, message in self._entries:
            if isinstance(message, StepOutputs):
                deltas = [
                    delta
                    for delta in message.deltas
                    if (row := adopted.get(delta.id)) is not None and delta.sequence >= row.deltas
                ]
                if deltas:
                    yield replace(message, deltas=deltas)
            elif (row := adopted.get(message.id)) is not None and _lacks(row, message):
                yield message


def _lacks(row: AdoptedRow, message: RowMessage) -> bool:
    match message:
        case Accepted():
            return not row.accepted
        case PrefixHit():
            return not row.reused and not row.deltas
        case PromptLogprobs():
            return message.first >= row.scored
        case EmbeddingChunk():
            return message.sequence >= row.deltas
    return True


def _reached(message: RowMessage) -> list[tuple[str, int]]:
    """Return the requests that a message is about, each with the number of its deltas up to there."""
    if isinstance(message, StepOutputs):
        return [(delta.id, delta.sequence + 1) for delta in message.deltas]
    return [(message.id, message.sequence + 1 if isinstance(message, EmbeddingChunk) else 0)]


def _size_of(message: RowMessage) -> int:
    """Estimate the memory of a message that is no step."""
    match message:
        case EmbeddingChunk():
            return _DELTA_BYTES + len(message.vectors)
        case PromptLogprobs():
            return sum(map(_likely_size, message.tokens))
        case Accepted():
            told = len(message.prompt) + 8 * len(message.tokens) + sum(map(len, message.pieces))
            return _DELTA_BYTES + told
    return _DELTA_BYTES


def _further_size(delta: Delta) -> int:
    calls = sum(_CALL_BYTES + len(call.name) + len(call.arguments) for call in delta.calls)
    return len(delta.reasoning) + calls + sum(map(_likely_size, delta.likelihoods))


def _likely_size(likelihood: TokenLogprob | PromptToken) -> int:
    return _LIKELY_BYTES * (1 + len(likelihood.top))
