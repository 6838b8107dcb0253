"""Every architecture of the zoo: rows say what upstream says alone, whatever happens around them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.oracle import Oracle
from tests.worker.zoo import ARCHITECTURES, differences, load
from worker.engine.caches import grouping

SEEDS = (0,)
"""Scenarios for each architecture; `python -m tests.worker.zoo` plays as many as one likes, larger ones."""
ROWS = 9


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as oracle:
        yield oracle


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that in lives this short buffers are outgrown and rows are grouped by length."""
    monkeypatch.setattr(grouping, "COLUMNS_STEP", 16)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_say_what_they_say_alone(architecture: str, oracle: Oracle) -> None:
    model = load(architecture)
    for seed in SEEDS:
        assert differences(model, architecture, seed, oracle, ROWS) == []
