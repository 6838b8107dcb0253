"""Adapters come and go under streams, and their worker is killed: no request fails, no text differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import adapters
from tests.system import running_system


@pytest.mark.timeout(300)
def test_visitors_and_a_kill_cost_other_streams_nothing(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        outcome = adapters.run(
            adapters.staged(system, tmp_path, 2, 1), seconds=1.0, kills=1, seed=1, clients=4
        )
    assert outcome.wrong == []
    assert outcome.faults == 1
    assert outcome.visits >= 1
    assert outcome.answers >= 4
