"""The rows of a draft model: each reads what a row of the engine says, and guesses how that goes on.

A row that reads its prompt has caches of its own; from its first draft on it is in a *flock*, whose rows
guess together, one token in each pass. Guesses are the likeliest tokens. In the caches of a flock stand, of
each row, the tokens that were read. What was guessed stands behind them until the next draft: where the row
has said it, and all layers have columns, it need not be run again; otherwise it is written over, and
recurrent states are again those from before the first guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.engine.caches import grouping
from worker.engine.caches.ahead import AheadBatch
from worker.engine.caches.batch import RowCaches
from worker.engine.caches.cost import row_cost
from worker.engine.weighing import weigh


class Flock:
    """Rows that guess together, in the order of `names`; None: a hole, until they are seated anew."""

    def __init__(self, model: nn.Module, fresh: Callable[[], RowCaches]) -> None:
        """`fresh` makes empty caches of a single row."""
        self.names: list[str | None] = []
        self._model = model
        self._fresh = fresh
        self._batch = AheadBatch(fresh())
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

    def seat(self, joining: Mapping[str, tuple[RowCaches, int]]) -> None:
        """Close the holes, and take in rows: their caches, and how many tokens these have read."""
        order = [place for place, name in enumerate(self.names) if name is not None]
        if not joining and len(order) == len(self.names):
            return
        order += range(len(self.names), len(self.names) + len(joining))
        caches, lengths = [row for row, _ in joining.values()], [length for _, length in joining.values()]
        self._batch.reseat(order, caches, lengths)
        self.names = [[*self.names, *joining][place] for place in order]

    def take(self, name: str) -> tuple[RowCaches, int]:
        """A row's own caches, and how many tokens they have read; it is here no longer."""
        place = self.names.index(name)
        own = self._batch.extract(place, self._fresh()), self._batch.lengths[place]
        self.leave(name)
        return own

    def leave(self, name: str) -> None:
        """A row goes."""
        self.names[self.names.index(name)] = None
        self._guessed.pop(name, None)

    def draft(self, news: Mapping[str, Sequence[int]], count: int) -> mx.array:
        """See `Drafter.draft`; [rows, count], lazily. Rows that are not asked guess anything."""
        guess = self._read(news)
        guesses, standing = [guess], self._batch.stand()
        for _ in range(count - 1):
            self._batch.begin([1] * len(self.names))
            logits = self._model(guess, cache=self._batch.caches)
            self._batch.finish()
            self._batch.settle([1] * len(self.names))
            guess = mx.argmax(logits[:, -1:], axis=-1)
            guesses.append(guess)
        self._batch.back(standing)
        found = mx.concatenate(guesses, axis=1)
        mx.async_eval(found, self._batch.state)
        return found

    def guessed(self, guesses: Mapping[str, Sequence[int]]) -> None:
        """These were the guesses of the last draft."""
        # The last of them was not fed.
        self._guessed = {} if self._batch.has_states else {name: all_[:-1] for name, all_ in guesses.items()}

    def _read(self, news: Mapping[str, Sequence[int]]) -> mx.array:
        """Feed the rows what they have not read; the likeliest tokens behind that, [rows, 1]."""
        wanted = [news.get(name, ()) if name else () for name in self.names]
        known = [self._known(name, new) for name, new in zip(self.names, wanted, strict=True)]
        self._batch.skip(known)
        feeds = [new[count:] for new, count in zip(wanted, known, strict=True)]
        counts = [len(feed) or 1 for feed in feeds]
        padded = [[*feed, *[0] * (max(counts) - len(feed))] for feed in feeds]
        self._batch.begin(counts)
        logits: mx.array = self._model(mx.array(padded, mx.uint32), cache=self._batch.caches)
        self._batch.finish()
        self._batch.settle([len(feed) for feed in feeds])
        ends = mx.array([count - 1 for count in counts])[:, None, None]
        return mx.argmax(mx.take_along_axis(logits, ends, axis=1)[:, 0], axis=-1, keepdims=True)

    def _known(self, name: str | None, new: Sequence[int]) -> int:
        """How many tokens, but for the last one, stand in the row's caches because they were guessed."""
        guessed = self._guessed.get(name, ()) if name else ()
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(guessed, new[:-1], strict=False))
        return sum(1 for _ in pairs)


class Followers:
    """`drafts.Drafter` on a language model."""

    def __init__(self, model: nn.Module, share: float, vocabulary: int) -> None:
        """`model`: its rows can be fed ahead. `vocabulary`: it knows so many tokens."""
        self.share = share
        self._model = model
        self._fresh = partial(make_prompt_cache, model)
        self._last_known = vocabulary - 1
        self._cost = row_cost(model)
        self._own: dict[str, tuple[RowCaches, int]] = {}
        """Rows in no flock: their caches, and how many tokens these have read."""
        self._flocks: list[Flock] = []

    def length(self, row: str) -> int:
        """See `Drafter`."""
        if (flock := self._flock(row)) is not None:
            return flock.length(row)
        return self._own[row][1] if row in self._own else 0

    def read(self, row: str, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        if (flock := self._flock(row)) is not None:
            self._own[row] = flock.take(row)
        caches, length = self._begun(row)
        self._model(mx.array([self._in_vocabulary(tokens)], mx.uint32), cache=caches)
        mx.eval([cache.state for cache in caches])
        self._own[row] = caches, length + len(tokens)

    def draft(self, news: Mapping[str, Sequence[int]], count: int) -> Mapping[str, Sequence[int]]:
        """See `Drafter`."""
        self._seat(news)
        known = {row: self._in_vocabulary(tokens) for row, tokens in news.items()}
        asked = [flock for flock in self._flocks if any(name in news for name in flock.names)]
        found = [(flock, flock.draft(known, count)) for flock in asked]
        guesses: dict[str, Sequence[int]] = {}
        for flock, each in found:
            told: Any = each.tolist()
            mine = {name: row for name, row in zip(flock.names, told, strict=True) if name and name in news}
            flock.guessed(mine)
            guesses |= mine
        return guesses

    def _seat(self, rows: Iterable[str]) -> None:
        """Every row has its place in a flock of rows of like length."""
        self._flocks = [flock for flock in self._flocks if any(flock.names)]
        joining: dict[int, dict[str, tuple[RowCaches, int]]] = {}
        lengths = [flock.lengths for flock in self._flocks]
        for row in rows:
            if self._flock(row) is not None:
                continue
            caches, length = self._begun(row)
            self._own.pop(row, None)
            place = grouping.place(lengths, length)
            if place == len(lengths):
                self._flocks.append(Flock(self._model, self._fresh))
                lengths.append([])
            lengths[place].append(length)
            joining.setdefault(place, {})[row] = caches, length
        for place, flock in enumerate(self._flocks):
            flock.seat(joining.get(place, {}))

    def _begun(self, row: str) -> tuple[RowCaches, int]:
        """A row's own caches, empty if it is new, and how many tokens they have read."""
        return self._own[row] if row in self._own else (self._fresh(), 0)

    def _flock(self, row: str) -> Flock | None:
        return next((flock for flock in self._flocks if row in flock.names), None)

    def _in_vocabulary(self, tokens: Sequence[int]) -> list[int]:
        # There may be more logits than tokens, and some day one of those is drawn.
        return [min(token, self._last_known) for token in tokens]

    def weigh(self, row: str, last: int) -> Sequence[float]:
        """See `drafts.Weigher`."""
        caches, _ = self._own[row]
        weights: Any = weigh(self._model, caches, last).tolist()
        return list(weights)

    def drop(self, row: str) -> None:
        """See `Drafter`."""
        self._own.pop(row, None)
        if (flock := self._flock(row)) is not None:
            flock.leave(row)
            self._flocks = [flock for flock in self._flocks if any(flock.names)]

    def reset(self) -> None:
        """See `Drafter`."""
        self._own.clear()
        self._flocks.clear()

    def cache_bytes(self) -> int:
        """See `Drafter`."""
        own: int = sum(cache.nbytes for caches, _ in self._own.values() for cache in caches)
        return own + sum(flock.nbytes for flock in self._flocks)

    def row_bytes(self, tokens: int) -> int:
        """See `Drafter`."""
        return self._cost(tokens)
