"""Probe network: a second network on a model's weights with shortened thresholds, on which rows are probed.

Thresholds are lengths in a config beyond which a model behaves differently: attention windows, chunks of
chunked attention, the keys or blocks selected by sparse attention, and the length from which positions were
scaled. Behaviour beyond a threshold depends on the model's code, not on the length, so it can be probed on
the same weights with all thresholds shortened. The network takes no memory: its own arrays are never
evaluated, and are replaced by those of the first one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import _get_classes

from worker.load.config import TEXT_KEYS
from worker.load.weights import Open, open_text, open_with_config
from worker.runner.kv.capability_probe import CAUGHT_UP_TOKENS_MAX, ProbeTarget

log = logging.getLogger(__name__)

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


def stage_for(folder: Path, network: nn.Module, open_network: Open = open_text) -> ProbeTarget:
    """Return the network to probe: the model's own if its config has no threshold, or if upstream accepts no
    shorter one."""
    config = json.loads((folder / "config.json").read_bytes())
    config = _filled(config, network)
    for near in shortened(config, CAUGHT_UP_TOKENS_MAX):
        try:
            twin = open_with_config(folder, near, open_network)
            twin.update(network.parameters())
        except Exception as error:  # upstream's loaders raise whatever a config leads to
            log.debug("no network with thresholds at %d tokens: %r", farthest(near), error)
            continue
        return ProbeTarget(twin, max(CAUGHT_UP_TOKENS_MAX, farthest(near)))
    return ProbeTarget(network, max(CAUGHT_UP_TOKENS_MAX, farthest(config)))


def _filled(config: Config, network: nn.Module) -> Config:
    """Return the config with upstream's default thresholds added."""
    whole = getattr(network, "whole", None)
    if whole is None:
        return _defaults(config) | config
    text = _thresholds(getattr(whole.config, "text_config", None))
    for key in TEXT_KEYS:
        if isinstance(config.get(key), dict) and config[key]:
            return _thresholds(whole.config) | config | {key: text | config[key]}
    return text | _thresholds(whole.config) | config


def _thresholds(built: Any) -> Config:
    """Return the thresholds of a config object that mlx-vlm has built."""
    values = vars(built) if dataclasses.is_dataclass(built) else {}
    return {name: value for name, value in values.items() if farthest({name: value})}


def _defaults(config: Config) -> Config:
    """Return mlx-lm's default thresholds."""
    try:
        _, arguments = _get_classes(config)
    except ValueError:  # not a family of mlx-lm's
        return {}
    fields = dataclasses.fields(arguments) if dataclasses.is_dataclass(arguments) else ()
    return {field.name: field.default for field in fields if farthest({field.name: field.default})}


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
