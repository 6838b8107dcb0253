"""Metal's command buffers are larger on the chips where that is faster."""

from __future__ import annotations

import pytest

from worker.process.command_buffers import LIMITS, MEGABYTES, OPERATIONS, raise_limits


@pytest.mark.parametrize(
    ("chip", "raised"),
    [("Apple M1", True), ("Apple M4 Pro", True), ("Apple M5", False), ("Apple M10", False), ("", False)],
)
def test_limits_are_raised_up_to_m4(chip: str, raised: bool) -> None:
    environ: dict[str, str] = {}
    raise_limits(environ, chip)
    assert environ == (LIMITS if raised else {})


def test_a_limit_of_the_user_stays() -> None:
    environ = {OPERATIONS: "77"}
    raise_limits(environ, "Apple M2")
    assert environ == {OPERATIONS: "77", MEGABYTES: LIMITS[MEGABYTES]}
