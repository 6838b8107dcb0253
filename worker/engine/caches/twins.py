"""Caches of mlx-lm's for networks of mlx-vlm's, whose own cannot be merged."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache
from mlx_vlm.models import cache as vlm

_KEEPS = ("update_and_fetch", "make_mask", "__getitem__", "__setitem__")


class _StateCache(vlm.ArraysCache):
    """Upstream's, merged of empty rows, claims that they are padded on the left by nothing, and then forgets
    what they are padded by on the right."""

    def prepare(self, lengths: Any = None, **padding: Any) -> None:
        upstream: Any = super()
        upstream.prepare(lengths=lengths, **padding)
        self.left_padding = None


def twin(cache: Any) -> Any:
    """An empty cache of mlx-lm's instead of mlx-vlm's own, which cannot be merged. What has no twin stays,
    and one of which a network asks more than of its kind, or something else."""
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
    """Whether a cache is of this kind, or of one that keeps and shows the same tokens."""
    known = set(dir(own)) <= set(dir(kind))
    return (
        issubclass(own, kind)
        and known
        and all(getattr(own, name, None) is getattr(kind, name, None) for name in _KEEPS)
    )
