"""Rotary embeddings as transformers 5 writes them, under `rope_parameters`, in the keys that upstream reads.

About fifty of mlx-lm's families know the older keys alone: without them they use their default base, and
answer wrongly without a word.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from worker.load.config import TEXT_KEYS

Config = Mapping[str, Any]

_KEY = "rope_parameters"
_BASES = ("rope_theta", "rotary_emb_base", "rope_embedding_base")
_LOCAL_BASES = ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta")
"""Of sliding-window layers, in families whose kinds of layers differ."""
_SHARES = ("partial_rotary_factor", "rotary_pct")
_APART = frozenset({"rope_theta", "partial_rotary_factor"})


def overrides(folder: Path) -> dict[str, Any]:
    """Return what to change in a folder's config for mlx-lm; empty for most."""
    from mlx_lm.utils import _get_classes

    config = json.loads((folder / "config.json").read_bytes())
    if not _is_told(config):
        return {}
    try:
        _, arguments = _get_classes(config)
    except ValueError:  # not a family of mlx-lm's
        return {}
    return translated(config, inspect.signature(arguments).parameters)


def translated(
    config: Config, known: Collection[str] | None = None, text: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the older keys, of a config and of its language model's. `known`, `text`: the keys that the
    family's arguments for each have; None: it is not known."""
    changed = _older(config, known)
    text = None if text is None else {*text} - {_KEY}  # some of mlx-vlm's have that key and do not read it
    for key in TEXT_KEYS:
        if isinstance(inner := config.get(key), dict) and (told := _older(inner, text)):
            changed[key] = inner | told
    return changed


def _is_told(config: Config) -> bool:
    inner = [config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)]
    return any(isinstance(each.get(_KEY), dict) for each in (config, *inner))


def _older(config: Config, known: Collection[str] | None) -> dict[str, Any]:
    told = config.get(_KEY)
    if not isinstance(told, dict) or (known is not None and _KEY in known):
        return {}
    local: Config = {}
    if isinstance(told.get("full_attention"), dict):  # one for each kind of layer
        local, told = told.get("sliding_attention") or {}, told["full_attention"]
    scaling = {key: value for key, value in told.items() if key not in _APART}
    is_scaled = scaling.get("rope_type", "default") != "default" or len(scaling) > 1
    found = {
        _name(_BASES, known): told.get("rope_theta"),
        _name(_LOCAL_BASES, known): local.get("rope_theta"),
        _name(_SHARES, known): told.get("partial_rotary_factor"),
        "rope_scaling": scaling if is_scaled else None,
    }
    return {
        key: value
        for key, value in found.items()
        if value is not None and config.get(key) is None and (known is None or key in known)
    }


def _name(names: tuple[str, ...], known: Collection[str] | None) -> str:
    return next((name for name in names if known is not None and name in known), names[0])
