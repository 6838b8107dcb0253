"""Fleet: dead, silent and stalled workers, choice of a worker, and refusals."""

from __future__ import annotations

import pytest

from broker.dispatch.fleet import (
    LOADING_PATIENCE,
    RETRY_ABSENT_S,
    RETRY_LOADING_S_DEFAULT,
    HealthState,
    Worker,
)
from protocol.errors import Code
from protocol.messages import Loading
from tests.broker.dispatcher_line import HUNG_S, SILENT_S, STALL_S, Line, ready


@pytest.fixture
def line() -> Line:
    return Line()


def worker_of(line: Line, name: str = "w") -> Worker:
    worker = line.dispatcher.fleet.get(name)
    assert worker is not None
    return worker


def found(line: Line, model: str | None = "m") -> str:
    worker = line.dispatcher.find(model)
    assert isinstance(worker, Worker)
    return worker.incarnation


def pass_s(line: Line, seconds: float) -> None:
    line.clock.now += seconds
    line.dispatcher.sweep()


def test_a_dead_worker_is_forgotten_but_not_its_model(line: Line) -> None:
    line.serving("w")
    for _ in range(2):
        line.dispatcher.lost("w")
        assert list(line.dispatcher.fleet) == []
        assert line.dispatcher.fleet.models.keys() == {"m"}
        error = line.refusal("m")
        assert (error.code, error.retry_after_s) == (Code.WORKER_UNAVAILABLE, RETRY_ABSENT_S)
        assert "`m`" in error.message
    line.serving("w2")
    assert found(line) == "w2"


def test_a_worker_counts_as_silent_after_so_long_until_it_speaks_and_is_reported_once(line: Line) -> None:
    line.serving("w")
    line.beat("w", running=1, steps=5)
    for silence_s in (SILENT_S, STALL_S + 1):
        pass_s(line, SILENT_S)
        assert worker_of(line).verdict is None
        pass_s(line, silence_s - SILENT_S + 0.01)
        assert worker_of(line).verdict is HealthState.SILENT
        pass_s(line, 0.01)
        assert line.refusal().code is Code.WORKER_UNAVAILABLE
        # It speaks again: a silence does not count towards a stall.
        line.beat("w", running=1, steps=5)
        pass_s(line, 0.0)
        assert found(line) == "w"
    assert line.dispatcher.traffic.models["m"].losses == {"silent": 2}
    line.hello("loading", "another")
    pass_s(line, SILENT_S + 1)
    assert line.refusal("another").code is Code.WORKER_UNAVAILABLE


def stall(line: Line, seconds: float, running: int = 2) -> None:
    """Send heartbeats whose step count does not advance."""
    for _ in range(round(seconds)):
        line.clock.now += 1.0
        line.beat("w", running=running, steps=5)
        line.dispatcher.sweep()


def test_a_worker_counts_as_stalled_when_rows_run_and_no_step_is_made_until_it_steps(line: Line) -> None:
    line.serving("w")
    stall(line, 10 * STALL_S, running=0)  # an idle worker makes no steps
    stall(line, STALL_S)
    assert worker_of(line).verdict is None
    stall(line, 2)
    assert worker_of(line).verdict is HealthState.STALLED
    assert line.refusal().code is Code.WORKER_UNAVAILABLE
    line.beat("w", running=2, steps=6)
    pass_s(line, 0.0)
    assert found(line) == "w"


def test_unresponsive_worker_counts_as_hung_and_loading_worker_later(line: Line) -> None:
    line.serving("hung")
    line.serving("wakes")
    line.hello("loading")
    pass_s(line, SILENT_S + 1)
    for seconds in (HUNG_S, 0.5):
        line.beat("wakes")
        assert line.killed == []
        pass_s(line, seconds)
    assert line.killed == [("hung", 1)]
    pass_s(line, LOADING_PATIENCE * HUNG_S)
    assert {"hung", "loading"} <= {worker for worker, _ in line.killed}


# --- choice of a worker ------------------------------------------------------------------------------


def test_a_model_nobody_has_named_does_not_exist(line: Line) -> None:
    line.serving("w1", "small")
    line.serving("w2", "large")
    error = line.refusal("huge")
    assert (error.code, error.param, error.retry_after_s) == (Code.MODEL_NOT_FOUND, "model", None)
    assert error.message == "The model `huge` does not exist here. Available: large, small."
    for asked in ("Large", "openai/large", "LARGE:8b", "larg"):
        assert "does not exist here; did you mean large?" in line.refusal(asked).message


def test_a_model_that_loads_says_how_far_it_is(line: Line) -> None:
    line.hello("w")
    error = line.refusal()
    assert (error.code, error.message) == (Code.MODEL_LOADING, "m is loading.")
    assert error.retry_after_s == RETRY_LOADING_S_DEFAULT
    line.say("w", Loading(incarnation="w", done=33, total=100))
    line.clock.now += 2
    assert line.refusal(None).message == "m is loading (33%)."
    assert line.refusal().retry_after_s == RETRY_LOADING_S_DEFAULT - 2


@pytest.mark.parametrize("outlived", [False, True])
def test_a_model_that_loads_again_is_expected_when_it_was_ready_the_last_time(
    outlived: bool, line: Line
) -> None:
    line.hello("w1")
    line.say("w1", Loading(incarnation="w1", done=0, total=100))
    line.clock.now += 30
    line.say("w1", ready("w1"))
    if outlived:  # a worker that was loaded before the gateway started says nothing about loading
        line.serving("w1")
    line.dispatcher.lost("w1")
    line.hello("w2")
    for passed_s, expected in ((0, 30), (10, 20), (15, 5), (100, 1)):
        line.clock.now += passed_s
        assert line.refusal().retry_after_s == pytest.approx(expected)
