"""`make soak`: its table of commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.commands import check_arguments
from tests.soak import LANES, SEEDS, Lane

WITHOUT_OPTIONS = ("simulation", "schedules")
"""Lanes whose programs take two numbers and have no parser."""


def test_a_lane_does_its_share_and_at_least_something() -> None:
    lane = Lane("a", 100, "m --seed {seed} --count {count} --end {end}", least=5)
    for seeds, count in ((SEEDS, 100), (SEEDS // 10, 10), (1, 5)):
        assert lane.words(5, seeds)[3:] == ["--seed", "5", "--count", str(count), "--end", str(5 + count)]


@pytest.mark.parametrize(
    "lane", [lane for lane in LANES if lane.name not in WITHOUT_OPTIONS], ids=lambda lane: lane.name
)
def test_a_lane_understands_its_smallest_size(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *words = lane.words(seed=7, seeds=1)[2:]
    check_arguments(module, words, monkeypatch)


def test_a_lane_really_runs() -> None:
    words = [sys.executable, "-m", "tests.soak", "--seed", "3", "--seeds", "2", "simulation"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0
    assert "python -m tests.broker.dispatch.test_dispatcher_simulated 3 5" in done.stdout
    assert done.stdout.endswith("all lanes passed\n")
