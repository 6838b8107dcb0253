"""Sparse prefill: caches of rows with skipped tokens. Later tokens keep their positions, but use the next
columns.

Upstream's models take the position of the next token from a cache's offset; its column is the cache's own
matter. So the caches of a row with *gaps* are wrapped, and report another offset. A sliding window counts
positions. While tokens within it are skipped, the older columns that it still holds are masked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

Span = tuple[int, int]
"""From a position to before another."""


@dataclass(frozen=True)
class Gaps:
    """`spans`: the skipped spans of a row, in order; all lie before the row's next token."""

    spans: tuple[Span, ...] = ()

    @cached_property
    def total(self) -> int:
        """Number of skipped tokens."""
        return sum(last - first for first, last in self.spans)

    def and_also(self, first: int, last: int) -> Gaps:
        """Return the gaps extended by a span behind them."""
        return Gaps((*self.spans, (first, last)))

    def columns(self, first: int, last: int) -> int:
        """Count the positions from `first` to before `last` that have a column."""
        first = max(first, 0)
        found = last - first
        for begin, end in reversed(self.spans):
            if end <= first:
                break
            found -= max(0, min(end, last) - max(begin, first))
        return found

    def runs(self, count: int, last: int) -> list[Span]:
        """Return the positions of the `count` columns before position `last`, in order."""
        return sorted(run for run in self._back(count, last) if run[0] < run[1])

    def _back(self, count: int, last: int) -> Iterator[Span]:
        for begin, end in reversed(self.spans):
            taken = min(count, last - end)
            yield last - taken, last
            count, last = count - taken, begin
            if not count:
                return
        yield last - count, last


NO_GAPS = Gaps()


class SkippingCache:
    """Wrapper around a single row's upstream cache, with the skipped tokens in `gaps`."""

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

    def __deepcopy__(self, memo: dict[int, Any]) -> SkippingCache:
        return SkippingCache(copy.deepcopy(self._cache, memo), self._gaps)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cache, name, value)  # some models attach arrays that must be evaluated with it

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return upstream's mask while nothing is skipped within the next token's window; else that of
        `_seen`."""
        sizes, at = self._windows(window_size), self.offset
        first = max(at + 1 - min(sizes), 0) if sizes else at
        if self._gaps.columns(first, at) == at - first:
            return self._cache.make_mask(N, return_array=return_array, window_size=window_size)
        return self._seen(N, min(sizes))

    def _windows(self, asked: int | None) -> list[int]:
        return [size for size in (getattr(self._cache, "max_size", None), asked) if size is not None]

    def _seen(self, count: int, window: int | None, hidden: Sequence[Span] = ()) -> mx.array:
        """Return the attention mask, [tokens, columns] bool; for one token [1, 1, 1, columns], as of a batch.
        A token attends to positions up to its own, within the window, that are not `hidden`."""
        columns, asking = self._positions(count), mx.arange(self.offset, self.offset + count)[:, None]
        seen = columns <= asking
        seen = seen if window is None else seen & (columns > asking - window)
        for first, last in hidden:
            seen = seen & ((columns < first) | (columns >= last))
        return seen[None, None] if count == 1 else seen

    def _positions(self, count: int) -> mx.array:
        """Return the positions of the columns that upstream returns with `count` more tokens, in that
        order."""
        at, width = self._cache.offset, getattr(self._cache, "max_size", None)
        held = at if width is None else min(at, width - 1)
        runs = [*self._gaps.runs(held, self.offset), (self.offset, self.offset + count)]
        positions = mx.concatenate([mx.arange(first, last) for first, last in runs])
        if width is None or count > 1:
            return positions
        # A ring: the token overwrites the oldest one, or goes behind the last.
        place = self._cache.state[-1]
        return mx.roll(positions, (place if place <= held else 0) + 1)


class HidingCache(SkippingCache):
    """A cache whose `spans` are masked: the reference for a cache in which these were skipped."""

    def __init__(self, cache: Any, spans: Sequence[Span]) -> None:
        super().__init__(cache)
        vars(self)["_hidden"] = spans

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return a mask that hides the spans."""
        return self._seen(N, min(self._windows(window_size), default=None), vars(self)["_hidden"])


def hiding(caches: Iterable[Any], *spans: Span) -> list[Any]:
    """Wrap the caches of a row such that `spans` are masked, but still stored."""
    return each_positional(caches, lambda cache: HidingCache(cache, spans))


def skipping(caches: Iterable[Any], first: int, last: int) -> list[Any]:
    """Return the caches of a row at position `first` that goes on at position `last`."""

    def skip(cache: Any) -> SkippingCache:
        whole, gaps = split(cache)
        return SkippingCache(whole, gaps.and_also(first, last))

    return each_positional(caches, skip)


def split(cache: Any) -> tuple[Any, Gaps]:
    """Return upstream's cache of a row and layer, and the gaps in it."""
    return (cache._cache, cache._gaps) if isinstance(cache, SkippingCache) else (cache, NO_GAPS)


def each_positional(caches: Iterable[Any], wrap: Callable[[Any], Any]) -> list[Any]:
    """Return all caches, with those that have columns wrapped."""
    return [_wrapped(cache, wrap) for cache in caches]


def _wrapped(cache: Any, wrap: Callable[[Any], Any]) -> Any:
    if hasattr(cache, "caches"):
        whole = copy.copy(cache)
        whole.caches = tuple(each_positional(cache.caches, wrap))
        return whole
    return wrap(cache) if hasattr(cache, "update_and_fetch") else cache
