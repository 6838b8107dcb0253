"""Rows of which some tokens are left out: what follows keeps its position, and lies in the next column.

The offset of a cache tells upstream's models where the next token stands; where it lies is the cache's own
business. So the caches of a row stay as they are, and the model is given them with another offset.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
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
    """A cache of whose columns `spans`, each from one to before another, nothing that comes can see anything:
    what it is to be like when these are left out."""

    def __init__(self, cache: Any, spans: Sequence[tuple[int, int]]) -> None:
        super().__init__(cache, 0)
        vars(self)["_hidden"] = spans

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """[tokens, columns] bool. Raises `ValueError` where there is a window: what is left out shifts it."""
        if window_size is not None or hasattr(self._cache, "max_size"):
            raise ValueError("a window sees other tokens when some are left out")
        columns = mx.arange(self._cache.offset + N)
        mask: mx.array = create_causal_mask(N, self._cache.offset)
        for first, last in vars(self)["_hidden"]:
            mask = mask & ((columns < first) | (columns >= last))
        return mask


def hiding(caches: RowCaches, *spans: tuple[int, int]) -> RowCaches:
    """As `gapped`, with what is left out there, but hidden."""
    return each_positional(caches, lambda cache: Hiding(cache, spans))


def gapped(caches: RowCaches, gap: int) -> RowCaches:
    """The caches of a row as a model is given them when `gap` of the tokens before the next are left out."""
    return each_positional(caches, lambda cache: Gapped(cache, gap)) if gap else caches


def each_positional(caches: Iterable[Any], wrap: Callable[[Any], Any]) -> RowCaches:
    """All of them, those that have columns wrapped."""
    return [_wrapped(cache, wrap) for cache in caches]


def _wrapped(cache: Any, wrap: Callable[[Any], Any]) -> Any:
    if hasattr(cache, "caches"):
        whole = copy.copy(cache)
        whole.caches = tuple(each_positional(cache.caches, wrap))
        return whole
    return wrap(cache) if hasattr(cache, "update_and_fetch") else cache
