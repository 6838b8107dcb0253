"""Mutated frames for both ends of the connection: a short run of `python -m tests.faults.frames`."""

from __future__ import annotations

from pathlib import Path

from tests.faults import frames

FRAMES = 4000


def test_a_gateway_lives_on_whatever_a_worker_says(tmp_path: Path) -> None:
    outcome = frames.at_gateway(tmp_path, FRAMES, seed=20)
    assert outcome.wrong == []
    assert outcome.answered
    # Some messages must pass the decoder and reach the later checks.
    assert outcome.heard.keys() >= {"Generate", "Cancel", "dropped as no_flight", "dropped as forged"}


def test_a_worker_lives_on_whatever_a_gateway_says(tmp_path: Path) -> None:
    outcome = frames.at_worker(tmp_path, FRAMES, seed=20)
    assert outcome.wrong == []
    assert outcome.answered == FRAMES // frames.BATCH
    # Further messages pass the decoder, whether they are refused then, or cancelled by one behind them.
    assert outcome.heard["Accepted"] + outcome.heard["Failed"] > outcome.answered
    assert outcome.heard.keys() >= {"Hello", "CacheCleared", "Finished"}
