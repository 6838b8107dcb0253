"""What a model's rows can do: a table of families that ships with the program, and the probe of all others.

A family's verdict depends on upstream's code for its layers and caches, not on its weights or sizes. So a
network is known by its *parts*: the classes of its modules and caches, and the names of its thresholds. It is
as able as one of the table that has these parts and perhaps more. `make zoo` writes the table. It holds for
the very versions of upstream's libraries that it was made with, because their patch releases change models
too; layers with kernels of their own for a GPU are known on the kind of device where they were probed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.cache import make_prompt_cache

from worker.load.probe_network import farthest, stage_for
from worker.load.probe_results import ProbeResults, key_of
from worker.load.weights import Open, open_text
from worker.runner.kv.batch import leaf_caches
from worker.runner.kv.capability_probe import BatchCapabilities, probe_capabilities
from worker.values import KVQuantization

TABLE = Path(__file__).with_name("capabilities.json")
LIBRARIES = ("mlx-lm", "mlx-vlm")
"""Whose versions the table must have been made with."""
_ROTATIONS = {
    *(f"mlx_lm.rope_utils.{name}RoPE" for name in ("Llama3", "Proportional", "SuScaled", "Yarn")),
    *(f"mlx_vlm.rope_utils.{name}RoPE" for name in ("Llama3", "Proportional", "Yarn")),
}
"""Rotary embeddings that call `mx.fast.rope` with a row's offset and constants, as `nn.RoPE` does: no parts.
Those left out look at the length."""


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
    Raises what upstream raises if not even a single row runs."""
    if kv_quantization is None and (found := look_up(network)) is not None:
        return found
    key = key_of(folder, weights, network, "capabilities", str(kv_quantization))
    if (stored := results.read(key, BatchCapabilities)) is not None:
        return stored
    target = replace(stage_for(folder, network, open_network), kv_quantization=kv_quantization)
    probed = probe_capabilities(target)
    if _is_complete(probed):  # the cause of a failed probe may be temporary
        results.write(key, probed)
    return probed


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
            parts |= {name, *_thresholds(module)}
    return parts


def _thresholds(module: nn.Module) -> Iterator[str]:
    """Yield the names of the thresholds among a module's attributes and those of its config."""
    for name, value in vars(module).items():
        inner = vars(value) if dataclasses.is_dataclass(value) else {name: value}
        yield from (each for each, count in inner.items() if type(count) is int and farthest({each: count}))


def _is_complete(found: BatchCapabilities) -> bool:
    """Return whether nothing failed in the probe."""
    needed = (found.together, found.padded, found.restorable, found.cut, found.ahead)
    return all(needed) and not found.reasons
