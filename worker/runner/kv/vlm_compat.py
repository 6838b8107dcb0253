"""mlx-lm caches for mlx-vlm networks, whose own caches cannot be merged."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache
from mlx_vlm.models import cache as vlm

_KEEPS = ("update_and_fetch", "make_mask", "__getitem__", "__setitem__")


class _StateCache(vlm.ArraysCache):
    """Workaround for upstream's `ArraysCache`: merged from empty rows, it takes its left padding for zero and
    then forgets its right padding."""

    def prepare(self, lengths: Any = None, **padding: Any) -> None:
        upstream: Any = super()
        upstream.prepare(lengths=lengths, **padding)
        self.left_padding = None


def twin(cache: Any) -> Any:
    """Return an empty mlx-lm cache in place of mlx-vlm's. Caches without an equivalent are returned as they
    are, and so are subclasses that networks use in another way."""
    kinds = (vlm.RotatingKVCache, vlm.KVCache, vlm.ArraysCache, vlm.CacheList)
    if not any(_is_one(type(cache), kind) for kind in kinds):
        return cache
    match cache:
        case vlm.RotatingKVCache():
            return RotatingKVCache(cache.max_size, cache.keep)
        case vlm.KVCache():
            return KVCache()
        case vlm.ArraysCache():
            return _StateCache(len(cache.cache))
        case _:
            return CacheList(*map(twin, cache.caches))


def _is_one(own: type, kind: type) -> bool:
    """Return whether `own` is `kind`, or a subclass that stores and returns the same tokens."""
    known = set(dir(own)) <= set(dir(kind))
    return (
        issubclass(own, kind)
        and known
        and all(getattr(own, name, None) is getattr(kind, name, None) for name in _KEEPS)
    )
