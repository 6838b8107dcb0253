"""Thresholds: lengths in a config beyond which a model behaves differently, and how to shorten them.

These are attention windows, chunks of chunked attention, the keys or blocks selected by sparse attention, and
the length from which positions were scaled. Behaviour beyond a threshold depends on the model's code, not on
the length, so it can be probed on the same weights with all thresholds shortened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_LENGTH = re.compile(
    r"((sliding|attention|attn|loop|local|swa)_window|window)(_size|_length)?"
    r"|attention_chunk_size|index_topk|indexer_budget|floor_scale"
)
_SCALED_FROM = re.compile(r"original_max_position_embeddings")
_BLOCK = re.compile(r"(index|sparse|candidate|blocksparse)_block_size")
_BLOCKS = re.compile(r"(index|sparse|candidate)_topk_blocks|blocksparse_num_local_blocks")
_ELSEWHERE = re.compile(r"(vision|audio|video)_\w+")
"""Parts of a config that do not describe the language model."""

Config = dict[str, Any]


def farthest(config: Config) -> int:
    """Return the largest threshold in tokens (of blocks: size times number); 0 if there is none."""
    block = max(_found(config, _BLOCK), default=1)
    lengths = [*_found(config, _LENGTH), *_found(config, _SCALED_FROM)]
    return max([*lengths, *(block * count for count in _found(config, _BLOCKS))], default=0)


def shortened(config: Config, tokens: int) -> Iterator[Config]:
    """Yield variants of the config with thresholds at `tokens` or as near as possible; a model may reject
    some of them. Empty if the config has none."""
    if not farthest(config):
        return
    lengths = [(_LENGTH, tokens), (_BLOCKS, 1)]
    yield _with(config, [(_LENGTH, tokens), (_SCALED_FROM, tokens), (_BLOCK, tokens // 2), (_BLOCKS, 2)])
    yield _with(config, [*lengths, (_SCALED_FROM, tokens)])
    yield _with(config, lengths)


def _found(part: Any, name: re.Pattern[str]) -> Iterator[int]:
    """Yield the counts whose keys match `name`, at any depth."""
    if isinstance(part, list):
        for each in part:
            yield from _found(each, name)
    if isinstance(part, Mapping):
        for key, value in part.items():
            if _is_count(value) and name.fullmatch(key):
                yield value
            elif not _ELSEWHERE.fullmatch(key):
                yield from _found(value, name)


def _with(part: Any, limits: Sequence[tuple[re.Pattern[str], int]]) -> Any:
    """Return a copy in which counts are limited by the key patterns in `limits`."""
    if isinstance(part, list):
        return [_with(each, limits) for each in part]
    if not isinstance(part, Mapping):
        return part
    return {
        key: value if _ELSEWHERE.fullmatch(key) else _limited(key, value, limits)
        for key, value in part.items()
    }


def _limited(key: str, value: Any, limits: Sequence[tuple[re.Pattern[str], int]]) -> Any:
    if not _is_count(value):
        return _with(value, limits)
    return min([value, *(limit for name, limit in limits if name.fullmatch(key))])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
