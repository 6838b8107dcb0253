"""Engines with known batching capabilities, as at every start of a model except the first."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.nn as nn

from worker.engine.caches.capability_probe import BatchCapabilities, ProbeTarget, probe_capabilities
from worker.engine.engine import BatchEngine

Open = Callable[[str], nn.Module]
"""Returns a network by name, the same object each time."""


def engine(network: Open, name: str) -> BatchEngine:
    """Return a new engine. Without cached capabilities each would probe the network, which takes as long as a
    test."""
    return BatchEngine(network(name), _abilities(network, name))


@cache
def _abilities(network: Open, name: str) -> BatchCapabilities:
    return probe_capabilities(ProbeTarget(network(name)))
