"""The lengths beyond which a model works otherwise, as far as its config names them, and how to shorten them.

A window, the chunks of chunked attention, the keys or blocks of keys that sparse attention chooses, the
length that positions were scaled from. What a model does beyond one is a matter of its code, not of how far
away it is: so it can be tried on the same weights with all of them close by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_LENGTH = re.compile(
    r"((sliding|attention|attn|loop|local|swa)_window|window)(_size|_length)?"
    r"|attention_chunk_size|index_topk|floor_scale"
)
_SCALED_FROM = re.compile(r"original_max_position_embeddings")
_BLOCK = re.compile(r"(index|sparse|candidate|blocksparse)_block_size")
_BLOCKS = re.compile(r"(index|sparse|candidate)_topk_blocks|blocksparse_num_local_blocks")
_ELSEWHERE = re.compile(r"(vision|audio|video)_\w+")
"""Parts of a config that are not the language model's."""

Config = dict[str, Any]


def farthest(config: Config) -> int:
    """The largest threshold in tokens; of blocks, their size times their number. 0: it names none."""
    block = max(_found(config, _BLOCK), default=1)
    lengths = [*_found(config, _LENGTH), *_found(config, _SCALED_FROM)]
    return max([*lengths, *(block * count for count in _found(config, _BLOCKS))], default=0)


def shortened(config: Config, tokens: int) -> Iterator[Config]:
    """The config with its thresholds at so many tokens or as near as can be, in ways of which a model may
    refuse some; none if it names none."""
    if not farthest(config):
        return
    lengths = [(_LENGTH, tokens), (_BLOCKS, 1)]
    yield _with(config, [(_LENGTH, tokens), (_SCALED_FROM, tokens), (_BLOCK, tokens // 2), (_BLOCKS, 2)])
    yield _with(config, [*lengths, (_SCALED_FROM, tokens)])
    yield _with(config, lengths)


def _found(part: Any, name: re.Pattern[str]) -> Iterator[int]:
    """The counts of that name, however deep."""
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
    """A copy in which no count of such a name is larger."""
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
