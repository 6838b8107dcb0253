"""Rows of which some tokens are left out: what follows keeps its position, and lies in the next column.

The offset of a cache tells upstream's models where the next token stands; where it lies is the cache's own
business. So the caches of a row stay as they are, and the model is given them with another offset. A window
is one of positions: while something within it was left out, what it would have held beyond is masked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from worker.engine.caches.batch import RowCaches
from worker.engine.caches.spans import NO_GAPS, Gaps, Span


class Gapped:
    """A single row's cache of upstream's, from which `gaps` were left out."""

    def __init__(self, cache: Any, gaps: Gaps = NO_GAPS) -> None:
        own = vars(self)
        own["_cache"], own["_gaps"] = cache, gaps

    @property
    def offset(self) -> int:
        """The position of the next token."""
        offset: int = self._cache.offset + self._gaps.total
        return offset

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_cache"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cache, name, value)  # some models tie to an array what must be evaluated with it

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Upstream's, while nothing is missing in the window of the next token; else `_seen`."""
        sizes, at = self._windows(window_size), self.offset
        first = max(at + 1 - min(sizes), 0) if sizes else at
        if self._gaps.columns(first, at) == at - first:
            return self._cache.make_mask(N, return_array=return_array, window_size=window_size)
        return self._seen(N, min(sizes))

    def _windows(self, asked: int | None) -> list[int]:
        return [size for size in (getattr(self._cache, "max_size", None), asked) if size is not None]

    def _seen(self, count: int, window: int | None, hidden: Sequence[Span] = ()) -> mx.array:
        """[tokens, columns] bool, of one token [1, 1, 1, columns] as of a batch: what stands at the position
        of each of the next tokens or before, within the window, and is not `hidden`."""
        columns, asking = self._positions(count), mx.arange(self.offset, self.offset + count)[:, None]
        seen = columns <= asking
        seen = seen if window is None else seen & (columns > asking - window)
        for first, last in hidden:
            seen = seen & ((columns < first) | (columns >= last))
        return seen[None, None] if count == 1 else seen

    def _positions(self, count: int) -> mx.array:
        """[columns]: where what upstream hands out with so many tokens more stands, in that order."""
        at, width = self._cache.offset, getattr(self._cache, "max_size", None)
        held = at if width is None else min(at, width - 1)
        runs = [*self._gaps.runs(held, self.offset), (self.offset, self.offset + count)]
        positions = mx.concatenate([mx.arange(first, last) for first, last in runs])
        if width is None or count > 1:
            return positions
        # A ring: the token is written over the oldest one, or behind the last.
        place = self._cache.state[-1]
        return mx.roll(positions, (place if place <= held else 0) + 1)


class Hiding(Gapped):
    """A cache of whose columns `spans` nothing that comes can see anything: what it is to be like when these
    are left out."""

    def __init__(self, cache: Any, spans: Sequence[Span]) -> None:
        super().__init__(cache)
        vars(self)["_hidden"] = spans

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """See `Gapped._seen`."""
        return self._seen(N, min(self._windows(window_size), default=None), vars(self)["_hidden"])


def hiding(caches: RowCaches, *spans: Span) -> RowCaches:
    """As `gapped`, with what is left out there, but hidden."""
    return each_positional(caches, lambda cache: Hiding(cache, spans))


def gapped(caches: RowCaches, gaps: Gaps) -> RowCaches:
    """The caches of a row as a model is given them from which `gaps` were left out."""
    return each_positional(caches, lambda cache: Gapped(cache, gaps)) if gaps.spans else caches


def each_positional(caches: Iterable[Any], wrap: Callable[[Any], Any]) -> RowCaches:
    """All of them, those that have columns wrapped."""
    return [_wrapped(cache, wrap) for cache in caches]


def _wrapped(cache: Any, wrap: Callable[[Any], Any]) -> Any:
    if hasattr(cache, "caches"):
        whole = copy.copy(cache)
        whole.caches = tuple(each_positional(cache.caches, wrap))
        return whole
    return wrap(cache) if hasattr(cache, "update_and_fetch") else cache
