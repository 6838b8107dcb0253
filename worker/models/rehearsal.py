"""A second network on a model's weights, its thresholds close by: there it is tried what its rows can do.

It takes no memory: what is loaded for it is never computed, and is replaced by the arrays of the first.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import mlx.nn as nn
from mlx_lm.utils import _get_classes, load_model

from worker.engine.caches.trial import NEAR_TOKENS, Stage
from worker.models.thresholds import Config, farthest, shortened

log = logging.getLogger(__name__)


def stage_for(folder: Path, network: nn.Module) -> Stage:
    """Where to try a text model: the network itself if its config names no threshold, or if upstream takes
    none that is nearer."""
    config = _with_defaults(json.loads((folder / "config.json").read_bytes()))
    for near in shortened(config, NEAR_TOKENS):
        try:
            twin, _ = load_model(folder, lazy=True, model_config=near)
            twin.update(network.parameters())
        except Exception as error:  # upstream's, of any kind: it is asked for what it may not take
            log.debug("no network with thresholds at %d tokens: %r", farthest(near), error)
            continue
        return Stage(twin, max(NEAR_TOKENS, farthest(near)))
    return Stage(network, max(NEAR_TOKENS, farthest(config)))


def _with_defaults(config: Config) -> Config:
    """The config with the thresholds that upstream fills in where it names none."""
    _, arguments = _get_classes(config)
    fields = dataclasses.fields(arguments) if dataclasses.is_dataclass(arguments) else ()
    return {field.name: field.default for field in fields if farthest({field.name: field.default})} | config
