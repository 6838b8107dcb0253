"""Layers that guess by what the model has thought: those its weights bring, and those trained for it since.

They are fed a token and the model's hidden states of the token before it; what they make of it is their
network's matter (`predicting`, `blocks`). What the model has thought is kept until they read it, of the last
tokens only: they begin anew behind a gap, and guess a little worse for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from worker.engine.caches.batch import RowCaches
from worker.engine.caches.grouping import columns_for
from worker.engine.flock import Flocks
from worker.engine.guessing import BlockNetwork, Network
from worker.engine.hearing import Tap, Taps

HEARD_TOKENS_MAX = 512
"""So many of the last hidden states are kept of a row that the layers do not read."""


class Layers(Protocol):
    """Of a network that guesses: what its caches are."""

    cache_values: int
    """That a token takes in them."""

    def fresh(self) -> RowCaches:
        """Empty ones of a single row."""


class HeardNetwork(Layers, Network, Protocol):
    """Guesses one token after the other."""


class HeardBlockNetwork(Layers, BlockNetwork, Protocol):
    """Guesses all at once."""


@dataclass(slots=True)
class Heard:
    """The hidden states from position `first` on, in parts, [tokens, width] each."""

    first: int
    parts: list[mx.array] = field(default_factory=list)
    count: int = 0

    @property
    def end(self) -> int:
        return self.first + self.count

    def add(self, part: mx.array) -> None:
        self.parts.append(part)
        self.count += part.shape[0]

    def take(self, count: int) -> mx.array:
        """The first of them, [count, width], which are kept no longer."""
        whole = mx.concatenate(self.parts)
        # A slice would hold on to all of it.
        self.parts = [mx.take(whole, mx.arange(count, self.count), axis=0)] if count < self.count else []
        self.first, self.count = self.first + count, self.count - count
        return whole[:count]

    def copy(self) -> Heard:
        return Heard(self.first, list(self.parts), self.count)


class Heads:
    """`drafts.Drafter` on such layers, and the `Ear` that it takes."""

    def __init__(self, network: HeardNetwork | HeardBlockNetwork, tap: Tap | Taps, share: float) -> None:
        """`tap`: where the hidden states come by, which something has run through already."""
        self.share = share
        self.block = network.block if isinstance(network, BlockNetwork) else 1
        self._layers: Layers = network
        self._tap = tap
        self._flocks = Flocks(network, network.fresh)
        self._heard: dict[str, Heard] = {}
        self._bases: dict[str, int] = {}
        """Of the rows that are being read: the position of the first hidden state."""
        self._ends: dict[str, int] = {}
        self._width, self._value_bytes = tap.last.shape[-1], tap.last.dtype.size

    # --- hearing.Ear ---

    def hear(self, rows: Sequence[str], counts: Sequence[int], firsts: Sequence[int] | None = None) -> None:
        """See `Ear`."""
        firsts = [self._ends.get(row, 0) for row in rows] if firsts is None else firsts
        states = self._tap.last
        for place, (row, count, first) in enumerate(zip(rows, counts, firsts, strict=True)):
            self._hear(row, states[place, :count], first)

    def _hear(self, row: str, states: mx.array, first: int) -> None:
        self._ends[row] = first + states.shape[0]
        heard = self._heard.get(row)
        if heard is None or first > heard.end:
            heard = self._begin(row, Heard(first))
        if self._ends[row] > heard.end:
            heard.add(states[heard.end - first :])
        if heard.count > 2 * HEARD_TOKENS_MAX:
            heard.take(heard.count - HEARD_TOKENS_MAX)
            mx.eval(heard.parts)  # nothing of the rest is held on to
            self._begin(row, heard)

    def _begin(self, row: str, heard: Heard) -> Heard:
        """What was read of a row is of no use any more."""
        self._flocks.drop(row)
        self._bases.pop(row, None)
        self._heard[row] = heard
        return heard

    def skip(self, row: str, count: int) -> None:
        """See `Ear`."""
        self._ends[row] = self._ends.get(row, 0) + count

    def copy(self, row: str, copy: str) -> None:
        """See `Ear`."""
        if row in self._ends:
            self._ends[copy] = self._ends[row]
        if row in self._heard and row not in self._bases:
            self._heard[copy] = self._heard[row].copy()

    # --- drafts.Drafter ---

    def knows(self, row: str) -> bool:
        """See `Drafter`."""
        return row in self._heard

    def length(self, row: str) -> int:
        """See `Drafter`. A token is read with the hidden state before it."""
        return self._heard[row].first + 1 if row in self._heard else 0

    def read(self, row: str, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        if self._heard[row].count < len(tokens):
            self._begin(row, Heard(self._heard[row].end))  # a gap: what comes is heard again
            return
        self._flocks.read(row, tokens, self._taken(row, len(tokens)))

    def draft(self, news: Mapping[str, Sequence[int]], count: int) -> Mapping[str, Sequence[int]]:
        """See `Drafter`."""
        known = {row: tokens for row, tokens in news.items() if self._heard[row].count >= len(tokens)}
        heard = {row: self._taken(row, len(tokens)) for row, tokens in known.items()}
        return self._flocks.draft(known, count, heard) if known else {}

    def _taken(self, row: str, count: int) -> mx.array:
        heard = self._heard[row]
        if row not in self._bases:
            self._bases[row] = heard.first
            self._flocks.begin(row, heard.first)
        return heard.take(count)

    def drop(self, row: str) -> None:
        """See `Drafter`."""
        self._flocks.drop(row)
        for known in (self._heard, self._bases, self._ends):
            known.pop(row, None)

    def reset(self) -> None:
        """See `Drafter`."""
        self._flocks.clear()
        for known in (self._heard, self._bases, self._ends):
            known.clear()

    def cache_bytes(self) -> int:
        """See `Drafter`."""
        kept = sum(heard.count for heard in self._heard.values())
        return self._flocks.nbytes + kept * self._width * self._value_bytes

    def row_bytes(self, tokens: int) -> int:
        """See `Drafter`."""
        kept = min(tokens, 2 * HEARD_TOKENS_MAX) * self._width
        return (columns_for(tokens) * self._layers.cache_values + kept) * self._value_bytes
