"""Probe network: a second network on a model's weights with shortened thresholds, on which rows are probed.

It takes no memory: its own arrays are never evaluated, and are replaced by those of the first network.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import _get_classes

from worker.load.config import TEXT_KEYS
from worker.load.probes.thresholds import Config, farthest, shortened
from worker.load.weights import Open, open_text, open_with_config
from worker.runner.kv.capability_probe import CAUGHT_UP_TOKENS_MAX, ProbeTarget

log = logging.getLogger(__name__)


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
