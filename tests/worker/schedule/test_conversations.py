"""Every architecture of the zoo: answers are equal with and without a prefix cache."""

from __future__ import annotations

import pytest

from tests.oracle import Oracle
from tests.worker.conversations import differences
from tests.worker.zoo import ARCHITECTURES, load

SEEDS = (0,)
"""Scenarios per architecture; `python -m tests.worker.conversations` runs any number of longer ones."""
TURNS = 12

NOT_STORED = {"deepseek_v41"}
"""Architectures whose upstream cache cannot be given a state."""


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in NOT_STORED])
def test_warm_answers_are_those_of_upstream_alone(architecture: str, oracle: Oracle) -> None:
    model = load(architecture)
    for seed in SEEDS:
        turns, wrong = differences(model, architecture, seed, oracle, TURNS)
        assert wrong == []
        assert sum(turn.cached for turn in turns) > 0.1 * sum(len(turn.prompt) for turn in turns)


def test_unstorable_cache_is_detected_at_load() -> None:
    for architecture in NOT_STORED:
        assert load(architecture).engine.shape is None
