"""A second network on a model's weights, its thresholds close by: there it is tried what its rows can do.

It takes no memory: what is loaded for it is never computed, and is replaced by the arrays of the first.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import _get_classes, load_model

from worker.engine.caches.trial import NEAR_TOKENS, Stage
from worker.models.config import TEXT_KEYS
from worker.models.thresholds import Config, farthest, shortened

log = logging.getLogger(__name__)

Open = Callable[[Path], nn.Module]
"""How a folder's network is loaded, its parameters lazily."""


def open_text(folder: Path) -> nn.Module:
    """mlx-lm's network."""
    network, _ = load_model(folder, lazy=True)
    return network


def stage_for(folder: Path, network: nn.Module, open_network: Open = open_text) -> Stage:
    """Where to try a model: the network itself if its config names no threshold, or if upstream takes none
    that is nearer."""
    config = json.loads((folder / "config.json").read_bytes())
    config = _filled(config, network)
    for near in shortened(config, NEAR_TOKENS):
        try:
            twin = _reopened(folder, near, open_network)
            twin.update(network.parameters())
        except Exception as error:  # upstream's loaders raise whatever a config leads to
            log.debug("no network with thresholds at %d tokens: %r", farthest(near), error)
            continue
        return Stage(twin, max(NEAR_TOKENS, farthest(near)))
    return Stage(network, max(NEAR_TOKENS, farthest(config)))


def _filled(config: Config, network: nn.Module) -> Config:
    """The config with the thresholds that upstream fills in where it names none."""
    whole = getattr(network, "whole", None)
    if whole is None:
        return _defaults(config) | config
    text = _thresholds(getattr(whole.config, "text_config", None))
    for key in TEXT_KEYS:
        if isinstance(config.get(key), dict) and config[key]:
            return _thresholds(whole.config) | config | {key: text | config[key]}
    return text | _thresholds(whole.config) | config


def _thresholds(built: Any) -> Config:
    """Those of a config as mlx-vlm has built it."""
    values = vars(built) if dataclasses.is_dataclass(built) else {}
    return {name: value for name, value in values.items() if farthest({name: value})}


def _defaults(config: Config) -> Config:
    """The same of mlx-lm's."""
    try:
        _, arguments = _get_classes(config)
    except ValueError:  # not a family of mlx-lm's
        return {}
    fields = dataclasses.fields(arguments) if dataclasses.is_dataclass(arguments) else ()
    return {field.name: field.default for field in fields if farthest({field.name: field.default})}


def _reopened(folder: Path, config: Config, open_network: Open) -> nn.Module:
    """The same weights under another config."""
    with tempfile.TemporaryDirectory(prefix="roundhouse-") as home:
        for file in folder.iterdir():
            if file.name != "config.json":
                (Path(home) / file.name).symlink_to(file.resolve())
        (Path(home) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return open_network(Path(home))
