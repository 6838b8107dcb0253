"""What a model's rows can do: a table of families that ships with the program, and the probe of all others.

A family's verdict depends on upstream's code for its layers and caches, not on its weights or sizes. So a
network is known by its *parts*: the classes of its modules and caches, and the names of its thresholds. It is
as able as one of the table that has these parts and perhaps more. `make zoo` writes the table. It holds for
the very versions of upstream's libraries that it was made with, because their patch releases change models
too; layers with kernels of their own for a GPU are known on the kind of device where they were probed.

Thresholds are lengths in a config beyond which a model behaves differently: attention windows, chunks of
chunked attention, the keys or blocks selected by sparse attention, and the length from which positions were
scaled. Behaviour beyond a threshold depends on the model's code, not on the length, so a second network on
the same weights is probed, with all thresholds shortened. It takes no memory: its own arrays are never
evaluated, and are replaced by those of the first one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from worker.interfaces import ModelError
from worker.load.config import TEXT_KEYS
from worker.load.probe_results import ProbeResults, key_of
from worker.load.weights import Open, open_text, open_with_config
from worker.runner.kv.batch import leaf_caches
from worker.runner.kv.capability_probe import (
    REFUSALS,
    THRESHOLD_TOKENS_MIN,
    BatchCapabilities,
    ProbeTarget,
    first_sentence,
    probe_capabilities,
)
from worker.runner.kv.row_caches import fresh_caches
from worker.values import KVQuantization

log = logging.getLogger(__name__)

TABLE = Path(__file__).with_name("capabilities.json")
LIBRARIES = ("mlx-lm", "mlx-vlm")
"""Whose versions the table must have been made with."""
_ROTATIONS = {
    *(f"mlx_lm.rope_utils.{name}RoPE" for name in ("Llama3", "Proportional", "SuScaled", "Yarn")),
    *(f"mlx_vlm.rope_utils.{name}RoPE" for name in ("Llama3", "Proportional", "Yarn")),
}
"""Rotary embeddings that call MLX's kernel with a row's offset and constants, as `nn.RoPE` does: no parts.
Those left out look at the length."""
_QUANTIZED_CHUNKS = ((3, 1, 4, 1, 5), (9, 2), (6,))
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


class FamilyVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the table. `lacks`: the fields of `BatchCapabilities` that are false, and `reasons` for them.
    `has_kernels`: for a GPU, of its own."""

    parts: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    has_kernels: bool = False

    @property
    def capabilities(self) -> BatchCapabilities:
        names = [field.name for field in dataclasses.fields(BatchCapabilities) if field.name != "reasons"]
        return BatchCapabilities(**{name: name not in self.lacks for name in names}, reasons=self.reasons)


class CapabilityTable(msgspec.Struct, frozen=True):
    """The table. `device`: on which it was probed, `cpu` or `gpu`."""

    versions: dict[str, str]
    device: str
    families: dict[str, FamilyVerdict]


def capabilities_of(
    folder: Path,
    network: nn.Module,
    weights: Iterable[Path],
    results: ProbeResults,
    open_network: Open = open_text,
    kv_quantization: KVQuantization | None = None,
) -> BatchCapabilities:
    """Return what a loaded network's rows can do, as the table or an earlier load knows it; or probe it.
    Raises `ModelError` if its caches cannot be quantized as asked, and what upstream raises if not even a
    single row runs."""
    if kv_quantization is None and (found := look_up(network)) is not None:
        return found
    key = key_of(folder, weights, network, "capabilities", str(kv_quantization))
    if (stored := results.read(key, BatchCapabilities)) is not None:
        return stored
    probed = probe(folder, network, open_network, kv_quantization)
    if _is_complete(probed):  # the cause of a failed probe may be temporary
        results.write(key, probed)
    return probed


def probe(
    folder: Path,
    network: nn.Module,
    open_network: Open,
    kv_quantization: KVQuantization | None,
    agree: Callable[[bool], bool] = bool,
    *,
    alike: bool = True,
) -> BatchCapabilities:
    """Probe what a network's rows can do. `agree`, `alike`: as for `probe_capabilities`. Raises as
    `capabilities_of`."""
    if kv_quantization is not None:
        require_quantizable(network, kv_quantization)
    target = replace(stage_for(folder, network, open_network), kv_quantization=kv_quantization)
    return probe_capabilities(target, agree, alike=alike)


def require_drafts(found: BatchCapabilities) -> None:
    """Raise `ModelError` if a draft model is of no use."""
    if not found.ahead:
        reasons = "; ".join(found.reasons)
        raise ModelError(f"no drafts can be tried on it ({reasons}): leave --draft-model out.")


def look_up(network: nn.Module) -> BatchCapabilities | None:
    """Return what the table says of a network; None: it does not know it."""
    table = read_table()
    if any(metadata.version(name) != version for name, version in table.versions.items()):
        return None
    parts, is_elsewhere = parts_of(network), device_kind() != table.device
    able = [
        family
        for family in table.families.values()
        if parts.issubset(family.parts) and not (family.has_kernels and is_elsewhere)
    ]
    return min(able, key=lambda family: len(family.parts)).capabilities if able else None


@cache
def read_table() -> CapabilityTable:
    return msgspec.json.decode(TABLE.read_bytes(), type=CapabilityTable)


def device_kind() -> str:
    return "cpu" if mx.default_device() == mx.cpu else "gpu"


def parts_of(network: Any) -> set[str]:
    """Return the parts of a network: for a vision model, of its language model, and the axes of positions."""
    parts = {type(cache).__name__ for cache in leaf_caches(make_prompt_cache(network))}
    whole = getattr(network, "whole", None)
    if whole is not None:
        parts.add(f"axes {network.axes}")
    for module in (network if whole is None else whole.language_model).modules():
        kind = type(module)
        name = f"{kind.__module__}.{kind.__qualname__}".replace(".models.", ".", 1).replace("Quantized", "")
        if not name.startswith("mlx.nn.") and name not in _ROTATIONS:
            parts |= {name, *_threshold_names(module)}
    return parts


def _threshold_names(module: nn.Module) -> Iterator[str]:
    """Yield the names of the thresholds among a module's attributes and those of its config."""
    for name, value in vars(module).items():
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        inner = {field.name: getattr(value, field.name, None) for field in fields} or {name: value}
        yield from (each for each, count in inner.items() if type(count) is int and farthest({each: count}))


def _is_complete(found: BatchCapabilities) -> bool:
    """Return whether nothing failed in the probe."""
    needed = (found.together, found.padded, found.restorable, found.cut, found.ahead)
    return all(needed) and not found.reasons


def require_quantizable(model: nn.Module, settings: KVQuantization) -> None:
    """Run a few tokens on quantized caches. Raises `ModelError` if the model's caches or its attention, which
    are upstream's, do not support them."""
    able = [cache for cache in make_prompt_cache(model) if hasattr(cache, "to_quantized")]
    if not able:
        why = "none of its layers has a KV cache that mlx-lm can quantize"
    elif any(hasattr(cache, "max_size") for cache in able):
        why = "mlx-lm cannot quantize those of its sliding-window layers"
    else:
        why = _refusal(model, settings)
    if why:
        asked = f"--kv-bits {settings.bits} with --kv-group-size {settings.group_size}"
        raise ModelError(f"{asked}: its KV caches cannot be quantized: {why}.")


def _refusal(model: nn.Module, settings: KVQuantization) -> str:
    """Return why the model cannot run on quantized caches; empty: it can."""
    try:
        caches = fresh_caches(model, settings)
        for tokens in _QUANTIZED_CHUNKS:
            mx.eval(model(mx.array([tokens], mx.uint32), cache=caches), [cache.state for cache in caches])
    except REFUSALS as error:
        return first_sentence(error).removesuffix(".")
    return ""


def stage_for(folder: Path, network: nn.Module, open_network: Open = open_text) -> ProbeTarget:
    """Return the network to probe: the model's own if its config has no threshold, or if upstream accepts no
    shorter one."""
    config = json.loads((folder / "config.json").read_bytes())
    config = _filled(config, network)
    for near in shortened(config, THRESHOLD_TOKENS_MIN):
        try:
            twin = open_with_config(folder, near, open_network)
            twin.update(network.parameters())
        except Exception as error:  # upstream's loaders raise whatever a config leads to
            log.debug("no network with thresholds at %d tokens: %r", farthest(near), error)
            continue
        return ProbeTarget(twin, max(THRESHOLD_TOKENS_MIN, farthest(near)))
    return ProbeTarget(network, max(THRESHOLD_TOKENS_MIN, farthest(config)))


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
