"""Random weights for the tiny models of mlx-vlm's families."""

from __future__ import annotations

import importlib
import json
import math
import re
from typing import Any

from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_type, update_module_configs

from tests.models.configs import Config

Shapes = dict[str, tuple[int, ...]]

PART_MAX = 2**22
"""Parameters of a part beside the language model; a larger one is left out of the weights, as conversions to
text do it."""
_ASKED_FOR = ("fastvlm",)
"""Families that upstream loads with all of their parts only."""
_TOWER = re.compile(r".*(vision|visual|audio|speech)")

_MODULES = ["text", "vision", "perceiver", "projector", "audio"]


def new_whole(config: Config) -> Any:
    """mlx-vlm's model for `config`, with the weights of its own constructor."""
    module = importlib.import_module(f"mlx_vlm.models.{get_model_type(config)}")
    # Upstream's classes rewrite the dictionaries they are given.
    given = {"text_config": {}, "vision_config": {}, "audio_config": {}} | json.loads(json.dumps(config))
    built = update_module_configs(module.ModelConfig.from_dict(given), module, given, _MODULES)
    return module.Model(built)


def shapes_of(config: Config) -> tuple[Shapes, Shapes]:
    """Every parameter by name, without those of parts that are too large; and those that are in the weights,
    too large as they are, though no text comes there."""
    shapes = {name: array.shape for name, array in tree_flatten(new_whole(config).parameters())}
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        part = name.partition(".")[0]
        sizes[part] = sizes.get(part, 0) + math.prod(shape)
    assert sizes.get("language_model", 0) < 2 * PART_MAX, f"not tiny: {sizes}"
    large = {part for part, size in sizes.items() if size > PART_MAX and part != "language_model"}
    drawn = {name: shape for name, shape in shapes.items() if name.partition(".")[0] not in large}
    others = shapes if config["model_type"] in _ASKED_FOR else {}
    if "model" in large:  # which is the language model as well
        inner = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
        drawn |= {name: shape for name, shape in inner.items() if not _TOWER.match(name)}
        others = inner
    return drawn, {name: shape for name, shape in others.items() if name not in drawn}
