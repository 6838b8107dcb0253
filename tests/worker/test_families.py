"""The family check finds any kind of failure."""

from __future__ import annotations

import re

import pytest

from tests.oracle import Oracle
from tests.worker.families import prove
from worker.load import capabilities
from worker.runner.kv.capability_probe import ProbeTarget

# Transformers warns about these families' configs, which cannot be changed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_a_family_that_is_wrong_in_batches_is_found(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "look_up", lambda network: None)
    monkeypatch.setattr(capabilities, "stage_for", lambda folder, network, opened: ProbeTarget(network))
    outcome = prove("minimax_m3_vl", 1, oracle)
    assert (outcome.verdict, outcome.batched) == ("wrong", True)
    assert re.match(r"seed 0, row \d, token \d+", outcome.why)
