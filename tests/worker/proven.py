"""Engines of networks whose abilities are known, as every start but a model's first has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.nn as nn

from worker.engine.caches.trial import Abilities, Stage, find_abilities
from worker.engine.engine import BatchEngine

Open = Callable[[str], nn.Module]
"""A network by its name, the same one each time."""


def engine(network: Open, name: str) -> BatchEngine:
    """A new one. Each would try the network for as long as a test takes otherwise."""
    return BatchEngine(network(name), _abilities(network, name))


@cache
def _abilities(network: Open, name: str) -> Abilities:
    return find_abilities(Stage(network(name)))
