"""Architectures for each kind of cache: answers are equal with and without a prefix cache."""

from __future__ import annotations

import pytest

from tests.oracle import Oracle
from tests.worker.conversations import differences
from tests.worker.runner.test_zoo import ALIKE
from tests.worker.zoo import ARCHITECTURES, load
from worker.values import KVQuantization

TURNS = 8
"""Turns of one scenario per architecture; `python -m tests.worker.conversations` runs any number."""
SEEDS = {"deepseek_v32": 1}
"""Scenarios of those whose first turns have little in common in the first one."""

NOT_STORED = {"deepseek_v41"}
"""Architectures whose upstream cache cannot be given a state."""


@pytest.mark.parametrize(
    "architecture", [name for name in ARCHITECTURES if name not in NOT_STORED and name not in ALIKE]
)
def test_warm_answers_are_those_of_upstream_alone(architecture: str, oracle: Oracle) -> None:
    model = load(architecture)
    turns, wrong = differences(model, architecture, SEEDS.get(architecture, 0), oracle, TURNS)
    assert wrong == []
    assert sum(turn.cached for turn in turns) > 0.1 * sum(len(turn.prompt) for turn in turns)


@pytest.mark.parametrize(
    ("architecture", "quantization", "seed"),
    [("dense", None, 1), ("hybrid", None, 1), ("hybrid", KVQuantization(8), 0)],
)
def test_so_are_those_of_rows_whose_drafts_were_verified(
    architecture: str, quantization: KVQuantization | None, seed: int, oracle: Oracle
) -> None:
    model = load(architecture, kv_quantization=quantization)
    turns, wrong = differences(model, architecture, seed, oracle, TURNS, drafted=True)
    assert wrong == []
    assert sum(turn.cached for turn in turns) > 0.1 * sum(len(turn.prompt) for turn in turns)


def test_unstorable_cache_is_detected_at_load() -> None:
    for architecture in NOT_STORED:
        assert load(architecture).engine.shape is None
