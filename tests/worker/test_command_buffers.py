"""Metal's command buffers are larger on the chips where that is faster."""

from __future__ import annotations

import os

import pytest

from worker.command_buffers import LIMITS, MEGABYTES, OPERATIONS, raise_limits


@pytest.mark.parametrize("chip", ["Apple M1", "Apple M1 Ultra", "Apple M3 Max", "Apple M4 Pro"])
def test_limits_are_raised_up_to_m4(chip: str) -> None:
    environ: dict[str, str] = {}
    raise_limits(environ, chip)
    assert environ == LIMITS


@pytest.mark.parametrize("chip", ["Apple M5", "Apple M5 Max", "Apple M10", "Intel(R) Core(TM) i9", ""])
def test_limits_of_mlx_stay_elsewhere(chip: str) -> None:
    environ: dict[str, str] = {}
    raise_limits(environ, chip)
    assert environ == {}


def test_a_limit_of_the_user_stays() -> None:
    environ = {OPERATIONS: "77"}
    raise_limits(environ, "Apple M2")
    assert environ == {OPERATIONS: "77", MEGABYTES: LIMITS[MEGABYTES]}


def test_this_machine_has_a_chip_that_is_known_or_none() -> None:
    environ = dict(os.environ)
    raise_limits(environ)
    assert environ.keys() - os.environ.keys() <= LIMITS.keys()
