"""`make soak`: its table of commands, and the evaluation of their results."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests import soak
from tests.commands import check_arguments
from tests.soak import LANES, Lane

WITHOUT_OPTIONS = ("simulation", "schedules")
"""Lanes whose programs take two numbers and have no parser."""
RUN = ("reloads",)
"""Lanes that take a few seconds; for the others, other tests run the same code."""
RUN_S_MAX = 100


def named(name: str) -> Lane:
    [lane] = [lane for lane in LANES if lane.name == name]
    return lane


def test_every_lane_is_a_command_that_there_is() -> None:
    for lane in LANES:
        module, *words = lane.words(seed=7, seeds=soak.SEEDS)[2:]
        assert importlib.util.find_spec(module), lane
        assert str(lane.full) in words or str(7 + lane.full) in words


def test_a_lane_does_its_share_and_at_least_something() -> None:
    lane = Lane("a", 100, "m --seed {seed} --count {count} --end {end}")
    for seeds, count in ((soak.SEEDS, 100), (soak.SEEDS // 10, 10), (1, 1)):
        assert lane.words(5, seeds)[3:] == ["--seed", "5", "--count", str(count), "--end", str(5 + count)]
    assert Lane("a", 100, "m {count}", least=60).words(5, seeds=1)[3:] == ["60"]


class Runs:
    """A replacement for `subprocess.run` that records commands and makes some fail."""

    def __init__(self, failing: str) -> None:
        self.commands: list[str] = []
        self._failing = failing

    def __call__(self, words: Sequence[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        self.commands.append(" ".join(words[2:]))
        return subprocess.CompletedProcess(words, int(self._failing in words))


def test_a_lane_that_fails_is_named_with_its_seed_and_the_others_run_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs("tests.faults.frames")
    monkeypatch.setattr(subprocess, "run", runs)
    assert soak.main(["--seed", "3", "--seeds", "200"]) == 1
    assert len(runs.commands) == len(LANES)
    assert "failed: frames, seed 3" in capsys.readouterr().out
    assert soak.main(["--seed", "3", "bodies", "disk"]) == 0
    assert len(runs.commands) == len(LANES) + 2


def test_rounds_take_new_seeds_until_the_time_is_over() -> None:
    seconds, lanes = iter(range(100)), LANES[:2]
    found = list(soak.rounds(lanes, 5, within_s=4.0, clock=lambda: next(seconds)))
    assert found == [(lanes[0], 5), (lanes[1], 5), (lanes[0], 5 + soak.ROUND), (lanes[1], 5 + soak.ROUND)]


@pytest.mark.parametrize("name", [lane.name for lane in LANES if lane.name not in WITHOUT_OPTIONS])
def test_a_lane_understands_its_smallest_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *words = named(name).words(seed=7, seeds=1)[2:]
    check_arguments(module, words, monkeypatch)


@pytest.mark.parametrize("name", RUN)
def test_a_lane_comes_through_at_its_smallest_size(name: str) -> None:
    words = named(name).words(seed=7, seeds=1)
    done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_lane_really_runs() -> None:
    words = [sys.executable, "-m", "tests.soak", "--seed", "3", "--seeds", "2", "simulation"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0
    assert "python -m tests.broker.dispatch.test_dispatcher_simulated 3 5" in done.stdout
    assert done.stdout.endswith("all lanes passed\n")
