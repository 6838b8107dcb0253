"""Random weights for the tiny models of mlx-vlm's families."""

from __future__ import annotations

import importlib
import json
import math
import re
from typing import Any

from mlx_vlm.utils import get_model_type, update_module_configs

from tests.models.arrays import named_parameters
from tests.models.configs import Config

Shapes = dict[str, tuple[int, ...]]

PART_MAX = 2**22
"""Largest part beside the language model, in parameters. A larger one is left out of the weights, as text
conversions do."""
_ASKED_FOR = ("fastvlm",)
"""Families that upstream loads only with all of their parts."""
_TOWER = re.compile(r".*(vision|visual|audio|speech)")

_MODULES = ["text", "vision", "perceiver", "projector", "audio"]


def new_whole(config: Config) -> Any:
    """Return mlx-vlm's model for `config`, with the weights of its own constructor."""
    module = importlib.import_module(f"mlx_vlm.models.{get_model_type(config)}")
    # Upstream's classes modify the dictionaries passed to them.
    given = {"text_config": {}, "vision_config": {}, "audio_config": {}} | json.loads(json.dumps(config))
    built = update_module_configs(module.ModelConfig.from_dict(given), module, given, _MODULES)
    return module.Model(built)


def shapes_of(config: Config) -> tuple[Shapes, Shapes]:
    """Return the shapes of all parameters that are drawn, and those of large parts that must be present
    although they generate no text."""
    shapes = {name: array.shape for name, array in named_parameters(new_whole(config))}
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        part = name.partition(".")[0]
        sizes[part] = sizes.get(part, 0) + math.prod(shape)
    assert sizes.get("language_model", 0) < 2 * PART_MAX, f"not tiny: {sizes}"
    large = {part for part, size in sizes.items() if size > PART_MAX and part != "language_model"}
    drawn = {name: shape for name, shape in shapes.items() if name.partition(".")[0] not in large}
    others = shapes if config["model_type"] in _ASKED_FOR else {}
    if "model" in large:  # also contains the language model
        inner = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
        drawn |= {name: shape for name, shape in inner.items() if not _TOWER.match(name)}
        others = inner
    return drawn, {name: shape for name, shape in others.items() if name not in drawn}
