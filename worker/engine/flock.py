"""Rows of a network that guess together, one token in each pass, or all at once.

Guesses are the likeliest tokens. In the caches of a flock stand, of each row, the tokens that were read.
What was guessed stands behind them until the next draft: where the row has said it, and all layers have
columns, it need not be run again, if the network keeps it; otherwise it is written over, and recurrent
states are again those from before the first guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.engine.caches import grouping
from worker.engine.caches.ahead import AheadBatch
from worker.engine.caches.batch import RowCaches
from worker.engine.guessing import BlockNetwork, Feed, Network
from worker.engine.trees import held_bytes

NOTHING_HEARD: Mapping[str, mx.array] = {}


@dataclass(slots=True)
class Seat:
    """A row outside of a flock: its caches, how many tokens these have read, and where the first stands."""

    caches: RowCaches
    length: int = 0
    base: int = 0


class Flock:
    """Rows that guess together, in the order of `names`; None: a hole, until they are seated anew."""

    def __init__(self, network: Network | BlockNetwork, fresh: Callable[[], RowCaches]) -> None:
        """`fresh` makes empty caches of a single row."""
        self.names: list[str | None] = []
        self._network = network
        self._fresh = fresh
        self._batch = AheadBatch(fresh())
        self._bases: list[int] = []
        self._guessed: dict[str, Sequence[int]] = {}
        """Of each row, the guesses that stand in its caches behind what it has read."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that the rows have read."""
        return [length for name, length in zip(self.names, self._batch.lengths, strict=True) if name]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return self._batch.nbytes

    def length(self, name: str) -> int:
        """Tokens that a row has read."""
        return self._batch.lengths[self.names.index(name)]

    def seat(self, joining: Mapping[str, Seat]) -> None:
        """Close the holes, and take in rows."""
        order = [place for place, name in enumerate(self.names) if name is not None]
        if not joining and len(order) == len(self.names):
            return
        order += range(len(self.names), len(self.names) + len(joining))
        seats = joining.values()
        self._batch.reseat(order, [seat.caches for seat in seats], [seat.length for seat in seats])
        self._bases = [[*self._bases, *(seat.base for seat in seats)][place] for place in order]
        self.names = [[*self.names, *joining][place] for place in order]

    def take(self, name: str) -> Seat:
        """A row's own; it is here no longer."""
        place = self.names.index(name)
        seat = Seat(self.copied(name), self._batch.lengths[place], self._bases[place])
        self.leave(name)
        return seat

    def copied(self, name: str) -> RowCaches:
        """A row's own caches, detached from those of the others."""
        return self._batch.extract(self.names.index(name), self._fresh())

    def leave(self, name: str) -> None:
        """A row goes."""
        self.names[self.names.index(name)] = None
        self._guessed.pop(name, None)

    def draft(
        self, news: Mapping[str, Sequence[int]], count: int, heard: Mapping[str, mx.array] = NOTHING_HEARD
    ) -> mx.array:
        """What each of these rows says behind its `news`, [rows, count], lazily. Rows that are not asked
        guess anything. `heard`: what was thought before each token of the news, [tokens, width]."""
        feed = self._feed(news, heard)
        if isinstance(self._network, BlockNetwork):
            found = self._at_once(self._network, feed, count)
        else:
            found = self._one_by_one(self._network, feed, count)
        mx.async_eval(found, self._batch.state)
        return found

    def _one_by_one(self, network: Network, feed: Feed, count: int) -> mx.array:
        thoughts = self._fed(network, feed.tokens, feed.before, feed.counts)
        self._batch.settle(feed.kept)
        lasts = mx.array([count - 1 for count in feed.counts])[:, None, None]
        thought = mx.take_along_axis(thoughts, lasts, axis=1)
        guesses, standing = [network.speak(thought)], self._batch.stand()
        for _ in range(count - 1):
            thought = self._fed(network, guesses[-1], thought, [1] * len(self.names))
            self._batch.settle([1] * len(self.names))
            guesses.append(network.speak(thought))
        self._batch.back(standing)
        return mx.concatenate(guesses, axis=1)

    def _at_once(self, network: BlockNetwork, feed: Feed, count: int) -> mx.array:
        self._batch.begin(feed.counts)
        found = network.guess(feed, self._positions(feed.tokens.shape[1]), self._batch.caches, count)
        self._batch.finish()
        self._batch.settle(feed.kept)
        return found

    def guessed(self, guesses: Mapping[str, Sequence[int]]) -> None:
        """These were the guesses of the last draft."""
        keeps = not isinstance(self._network, BlockNetwork) and self._network.keeps
        # The last of them was not fed.
        self._guessed = (
            {name: all_[:-1] for name, all_ in guesses.items()}
            if keeps and not self._batch.has_states
            else {}
        )

    def _feed(self, news: Mapping[str, Sequence[int]], heard: Mapping[str, mx.array]) -> Feed:
        """What the rows are fed: what they have not read."""
        wanted = [news.get(name, ()) if name else () for name in self.names]
        known = [self._known(name, new) for name, new in zip(self.names, wanted, strict=True)]
        self._batch.skip(known)
        feeds = [new[count:] for new, count in zip(wanted, known, strict=True)]
        counts = [len(feed) or 1 for feed in feeds]
        padded = mx.array([[*feed, *[0] * (max(counts) - len(feed))] for feed in feeds], mx.uint32)
        before = self._padded(heard, known, max(counts)) if heard else None
        return Feed(padded, before, counts, [len(feed) for feed in feeds])

    def _padded(self, heard: Mapping[str, mx.array], known: Sequence[int], width: int) -> mx.array:
        """Of each row what was heard before the tokens that it is fed, [rows, width, …]."""
        like = next(iter(heard.values()))
        rows = [
            heard[name][count:] if name and name in heard else like[:0]
            for name, count in zip(self.names, known, strict=True)
        ]
        return mx.stack([mx.pad(row, [(0, width - row.shape[0]), (0, 0)]) for row in rows])

    def _fed(
        self, network: Network, tokens: mx.array, before: mx.array | None, counts: Sequence[int]
    ) -> mx.array:
        self._batch.begin(counts)
        thoughts = network.think(tokens, before, self._positions(tokens.shape[1]), self._batch.caches)
        self._batch.finish()
        return thoughts

    def _positions(self, width: int) -> mx.array:
        """Of what rows are fed next, [rows, width]."""
        starts = mx.array(self._batch.lengths, mx.int32) + mx.array(self._bases, mx.int32)
        return starts[:, None] + mx.arange(width, dtype=mx.int32)

    def _known(self, name: str | None, new: Sequence[int]) -> int:
        """How many tokens, but for the last one, stand in the row's caches because they were guessed."""
        guessed = self._guessed.get(name, ()) if name else ()
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(guessed, new[:-1], strict=False))
        return sum(1 for _ in pairs)


class Flocks:
    """All rows of a network: in flocks of like length, or with caches of their own."""

    def __init__(self, network: Network | BlockNetwork, fresh: Callable[[], RowCaches]) -> None:
        """`fresh` makes empty caches of a single row."""
        self._network = network
        self._fresh = fresh
        self._own: dict[str, Seat] = {}
        self._flocks: list[Flock] = []

    def length(self, row: str) -> int:
        """Tokens that the row has read; 0 of an unknown one."""
        if (flock := self._flock(row)) is not None:
            return flock.length(row)
        return self._own[row].length if row in self._own else 0

    def begin(self, row: str, base: int) -> None:
        """A new row, whose first token stands at this position; what was of it is forgotten."""
        self.drop(row)
        self._own[row] = Seat(self._fresh(), base=base)

    def read(self, row: str, tokens: Sequence[int], before: mx.array | None = None) -> None:
        """See `Drafter`. `before`: what was thought before each, [tokens, width]."""
        if (flock := self._flock(row)) is not None:
            self._own[row] = flock.take(row)
            self._let_go()
        seat = self._own.setdefault(row, Seat(self._fresh()))
        first = seat.base + seat.length
        positions = mx.arange(first, first + len(tokens), dtype=mx.int32)[None]
        fed, heard = mx.array([list(tokens)], mx.uint32), None if before is None else before[None]
        self._network.think(fed, heard, positions, seat.caches)
        mx.eval([cache.state for cache in seat.caches])
        seat.length += len(tokens)

    def restore(self, row: str, caches: RowCaches, length: int) -> None:
        """A row that has read so many tokens; what was of it is forgotten."""
        self.drop(row)
        self._own[row] = Seat(caches, length)

    def copied(self, row: str) -> RowCaches:
        """The caches of a row that has read something, or copies of them."""
        flock = self._flock(row)
        return self.own(row) if flock is None else flock.copied(row)

    def own(self, row: str) -> RowCaches:
        """The caches of a row that has read something, and guessed nothing yet."""
        caches: RowCaches = self._own[row].caches
        return caches

    def draft(
        self, news: Mapping[str, Sequence[int]], count: int, heard: Mapping[str, mx.array] = NOTHING_HEARD
    ) -> Mapping[str, Sequence[int]]:
        """See `Drafter` and `Flock.draft`."""
        self._seat(news)
        asked = [flock for flock in self._flocks if any(name in news for name in flock.names)]
        found = [(flock, flock.draft(news, count, heard)) for flock in asked]
        guesses: dict[str, Sequence[int]] = {}
        for flock, each in found:
            told: Any = each.tolist()
            mine = {name: row for name, row in zip(flock.names, told, strict=True) if name and name in news}
            flock.guessed(mine)
            guesses |= mine
        return guesses

    def _seat(self, rows: Iterable[str]) -> None:
        """Every row has its place in a flock of rows of like length."""
        joining: dict[int, dict[str, Seat]] = {}
        lengths = [flock.lengths for flock in self._flocks]
        for row in rows:
            if self._flock(row) is not None:
                continue
            seat = self._own.pop(row, None) or Seat(self._fresh())
            place = grouping.place(lengths, seat.length)
            if place == len(lengths):
                self._flocks.append(Flock(self._network, self._fresh))
                lengths.append([])
            lengths[place].append(seat.length)
            joining.setdefault(place, {})[row] = seat
        for place, flock in enumerate(self._flocks):
            flock.seat(joining.get(place, {}))

    def _flock(self, row: str) -> Flock | None:
        return next((flock for flock in self._flocks if row in flock.names), None)

    def drop(self, row: str) -> None:
        """Forget a row. Unknown ones are no error."""
        self._own.pop(row, None)
        if (flock := self._flock(row)) is not None:
            flock.leave(row)
            self._let_go()

    def _let_go(self) -> None:
        """Forget flocks that nobody is left in."""
        self._flocks = [flock for flock in self._flocks if any(flock.names)]

    def clear(self) -> None:
        """Forget every row."""
        self._own.clear()
        self._flocks.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        own = sum(held_bytes(cache) for seat in self._own.values() for cache in seat.caches)
        return own + sum(flock.nbytes for flock in self._flocks)
