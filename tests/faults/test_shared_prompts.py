"""A kill under streams with long prompts that share prefixes: a short run of the lane, without a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.prompt_sets import Sizes
from tests.faults.several import full_server
from tests.faults.shared_prompts import Soak
from tests.models.fixtures import model_folder
from tests.oracle import Oracle

SIZES = Sizes(prompt_max=1300, answer_max=300, requests=5)
"""Answers that last longer than it takes to kill under them."""
STREAMS = 6


@pytest.mark.timeout(900)
def test_streams_with_shared_prefixes_survive_a_kill(tmp_path: Path) -> None:
    model = model_folder("dense")
    with Oracle() as oracle, full_server(tmp_path, model) as server:
        [before] = server.status()["workers"]
        soak = Soak(server, model, SIZES, seed=7, streams=STREAMS, life_s=0.1)
        outcome = soak.run(["worker"], oracle)
        [after] = server.status()["workers"]
        assert f"worker runs as pid {after['pid']}, which was the spare" in server.process.log()
    assert outcome.wrong == []
    assert after["start_s"]["imports"] < before["start_s"]["imports"]
    # Kills must hit open streams, and prefixes must be restored.
    assert outcome.kills == {"worker": 1}
    assert outcome.met
    assert outcome.reused
    assert outcome.answers == STREAMS
