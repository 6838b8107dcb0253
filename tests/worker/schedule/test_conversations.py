"""Every architecture of the zoo: cold and warm answers are the same, whatever is reused of what is stored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.oracle import Oracle
from tests.worker.conversations import differences
from tests.worker.zoo import ARCHITECTURES, load

SEEDS = (0,)
"""Scenarios for each architecture; `python -m tests.worker.conversations` plays as many as one likes, longer
ones."""
TURNS = 12

NOT_STORED = {"deepseek_v41"}
"""Upstream's cache of it cannot be given a state."""


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as oracle:
        yield oracle


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in NOT_STORED])
def test_warm_answers_are_those_of_upstream_alone(architecture: str, oracle: Oracle) -> None:
    model = load(architecture)
    for seed in SEEDS:
        turns, wrong = differences(model, architecture, seed, oracle, TURNS)
        assert wrong == []
        assert sum(turn.cached for turn in turns) > 0.1 * sum(len(turn.prompt) for turn in turns)


def test_what_cannot_be_stored_is_known_at_load() -> None:
    for architecture in NOT_STORED:
        assert load(architecture).engine.shape is None
