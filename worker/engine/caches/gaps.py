"""Rows of which some tokens are left out: what follows keeps its position, and lies in the next column.

The offset of a cache tells upstream's models where the next token stands; where it lies is the cache's own
business. So the caches of a row stay as they are, and the model is given them with another offset.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from worker.engine.caches.batch import RowCaches


class Gapped:
    """A single row's cache of upstream's, whose next token stands `gap` positions behind its columns."""

    def __init__(self, cache: Any, gap: int) -> None:
        own = vars(self)
        own["_cache"], own["_gap"] = cache, gap

    @property
    def offset(self) -> int:
        """The position of the next token."""
        offset: int = self._cache.offset + self._gap
        return offset

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_cache"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cache, name, value)  # some models tie to an array what must be evaluated with it


class Hiding(Gapped):
    """A cache from the columns `first` to before `last` of which nothing that comes can see anything: what it
    is to be like when these are left out."""

    def __init__(self, cache: Any, first: int, last: int) -> None:
        super().__init__(cache, 0)
        vars(self)["_hidden"] = first, last

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """[tokens, columns] bool. Raises `ValueError` where there is a window, which what is left out shifts."""
        if window_size is not None or hasattr(self._cache, "max_size"):
            raise ValueError("a window sees other tokens when some are left out")
        columns = mx.arange(self._cache.offset + N)
        first, last = vars(self)["_hidden"]
        return create_causal_mask(N, self._cache.offset) & ((columns < first) | (columns >= last))


def hiding(caches: RowCaches, first: int, last: int) -> RowCaches:
    """As `gapped`, with those columns there, but hidden."""
    return _each(caches, lambda cache: Hiding(cache, first, last))


def gapped(caches: RowCaches, gap: int) -> RowCaches:
    """The caches of a row as a model is given them when `gap` of the tokens before the next are left out."""
    return _each(caches, lambda cache: Gapped(cache, gap)) if gap else caches


def _each(caches: Iterable[Any], wrap: Callable[[Any], Any]) -> RowCaches:
    """All of them, those that have columns wrapped."""
    return [_wrapped(cache, wrap) for cache in caches]


def _wrapped(cache: Any, wrap: Callable[[Any], Any]) -> Any:
    if hasattr(cache, "caches"):
        whole = copy.copy(cache)
        whole.caches = tuple(_each(cache.caches, wrap))
        return whole
    return wrap(cache) if hasattr(cache, "update_and_fetch") else cache
