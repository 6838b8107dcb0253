"""Networks that are loaded once, and engines on them with known capabilities, as at every start of a model
except the first: a probe takes as long as a test."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from mlx_lm.utils import load_model

from tests.models.fixtures import model_folder
from worker.runner.kv.capability_probe import BatchCapabilities, ProbeTarget, probe_capabilities
from worker.runner.runner import BatchEngine

MODELS = ("dense", "hybrid", "sliding")
"""All tokens, states, and windows of 32 tokens."""


@cache
def network(name: str) -> Any:
    return load_model(model_folder(name))[0]


@cache
def _capabilities(name: str) -> BatchCapabilities:
    return probe_capabilities(ProbeTarget(network(name)))


def engine_of(name: str) -> BatchEngine:
    """Return a new engine."""
    return BatchEngine(network(name), _capabilities(name))


def prompt_of(seed: int, tokens: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 2000) for _ in range(tokens))
