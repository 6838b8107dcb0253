"""`make soak`: its table of commands, and what it makes of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests import soak
from tests.soak import LANES, Lane


def test_every_lane_is_a_command_that_there_is() -> None:
    for lane in LANES:
        module, *words = lane.words(seed=7, seeds=soak.SEEDS)[2:]
        assert importlib.util.find_spec(module), lane
        assert str(lane.full) in words or str(7 + lane.full) in words


def test_a_lane_does_its_share_and_at_least_something() -> None:
    lane = Lane("a", 100, "m --seed {seed} --count {count} --end {end}")
    for seeds, count in ((soak.SEEDS, 100), (soak.SEEDS // 10, 10), (1, 1)):
        assert lane.words(5, seeds)[3:] == ["--seed", "5", "--count", str(count), "--end", str(5 + count)]


class Runs:
    """Stands in for the commands: which were run, and whether they failed."""

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


def test_a_lane_really_runs() -> None:
    words = [sys.executable, "-m", "tests.soak", "--seed", "3", "--seeds", "2", "simulation"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0
    assert "python -m tests.broker.dispatch.test_dispatcher_simulated 3 5" in done.stdout
    assert done.stdout.endswith("all came through\n")
