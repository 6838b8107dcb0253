"""Fleet: dead, silent and stalled workers, choice of a worker, and refusals."""

from __future__ import annotations

from collections import Counter

import pytest

from broker.dispatch.fleet import (
    LOADING_PATIENCE,
    RETRY_ABSENT_S,
    RETRY_LOADING_S_DEFAULT,
    Fleet,
    HealthState,
    Worker,
)
from protocol.errors import Code, RequestError
from protocol.messages import Heartbeat, Hello, Loading, Ready
from protocol.types import Capabilities

SILENT_S, STALL_S = 3.0, 120.0


class Yard:
    """Fleet with a manual clock."""

    def __init__(self) -> None:
        self.fleet = Fleet(silent_after_s=SILENT_S, stall_timeout_s=STALL_S)
        self.now = 1000.0
        self.assigned: Counter[str] = Counter()

    def hello(self, incarnation: str = "w", model: str = "m") -> Worker:
        message = Hello(incarnation=incarnation, version=1, model=model, pid=7)
        return self.fleet.hello(message, self.now)

    def load(self, worker: Worker, seconds: float = 4.0) -> Worker:
        """Load the worker in `seconds`."""
        self.fleet.loading(worker, Loading(incarnation=worker.incarnation, done=0, total=100))
        self.now += seconds
        return self.ready(worker)

    def ready(self, worker: Worker) -> Worker:
        message = Ready(
            incarnation=worker.incarnation, model=worker.model, context_length=8192, running_max=16
        )
        self.fleet.touch(worker, self.now)
        self.fleet.ready(worker, message, self.now)
        return worker

    def serving(self, incarnation: str = "w", model: str = "m") -> Worker:
        return self.ready(self.hello(incarnation, model))

    def beat(self, worker: Worker, running: int = 0, steps: int = 0) -> None:
        message = Heartbeat(incarnation=worker.incarnation, running=running, waiting=0, steps=steps)
        self.fleet.touch(worker, self.now)
        self.fleet.heartbeat(worker, message, self.now)

    def find(self, model: str | None = None) -> Worker:
        return self.fleet.find(model, self.now, lambda worker: (False, self.assigned[worker.incarnation]))

    def refusal(self, model: str | None = None) -> RequestError:
        with pytest.raises(RequestError) as caught:
            self.find(model)
        return caught.value


@pytest.fixture
def yard() -> Yard:
    return Yard()


# --- dead --------------------------------------------------------------------------------------------


def test_a_dead_worker_is_forgotten_but_not_its_model(yard: Yard) -> None:
    assert yard.refusal("m").code is Code.WORKER_UNAVAILABLE
    worker = yard.serving()
    assert yard.fleet.gone("w") is worker
    assert yard.fleet.get("w") is None
    assert list(yard.fleet) == []
    assert yard.fleet.gone("w") is None
    assert yard.fleet.models.keys() == {"m"}
    error = yard.refusal("m")
    assert (error.code, error.retry_after_s) == (Code.WORKER_UNAVAILABLE, RETRY_ABSENT_S)
    assert "`m`" in error.message
    successor = yard.serving("w2")
    assert yard.find("m") is successor


# --- silent ------------------------------------------------------------------------------------------


def test_a_worker_counts_as_silent_after_so_long_and_is_reported_once_each_time(yard: Yard) -> None:
    worker = yard.serving()
    yard.beat(worker, running=1, steps=5)
    for silence_s in (SILENT_S, STALL_S + 1):
        yard.now += SILENT_S
        assert yard.fleet.sweep(yard.now) == []
        yard.now += silence_s - SILENT_S + 0.01
        assert yard.fleet.sweep(yard.now) == [worker]
        assert worker.verdict is HealthState.SILENT
        assert yard.fleet.sweep(yard.now + 100) == []
        assert yard.refusal("m").code is Code.WORKER_UNAVAILABLE
        # It speaks again: a silence does not count towards a stall.
        yard.beat(worker, running=1, steps=5)
        assert yard.fleet.sweep(yard.now) == []
        assert yard.find("m") is worker
    yard.hello("loading", "another")
    yard.now += SILENT_S + 1
    yard.fleet.sweep(yard.now)
    assert yard.refusal("another").code is Code.WORKER_UNAVAILABLE


# --- stalled -----------------------------------------------------------------------------------------


def stall(yard: Yard, worker: Worker, seconds: float) -> None:
    """Send heartbeats whose step count does not advance."""
    until = yard.now + seconds
    while yard.now < until:
        yard.now = min(until, yard.now + 1.0)
        yard.beat(worker, running=2, steps=5)


def test_a_worker_counts_as_stalled_when_rows_run_and_no_step_is_made_until_it_steps(yard: Yard) -> None:
    worker = yard.serving()
    yard.beat(worker, running=2, steps=5)
    stall(yard, worker, STALL_S)
    assert yard.fleet.sweep(yard.now) == []
    stall(yard, worker, 1)
    assert yard.fleet.sweep(yard.now) == [worker]
    assert worker.verdict is HealthState.STALLED
    assert yard.fleet.sweep(yard.now) == []
    yard.beat(worker, running=2, steps=5)
    assert not worker.serves
    assert yard.refusal("m").code is Code.WORKER_UNAVAILABLE
    yard.beat(worker, running=2, steps=6)
    assert yard.fleet.sweep(yard.now) == []
    assert yard.find("m") is worker


def test_time_a_worker_was_idle_does_not_count_towards_a_stall(yard: Yard) -> None:
    worker = yard.serving()
    for _ in range(10):
        yard.now += STALL_S
        yard.beat(worker, running=0, steps=5)
        assert yard.fleet.sweep(yard.now) == []
    yard.now += 0.25
    yard.beat(worker, running=1, steps=5)
    assert yard.fleet.sweep(yard.now) == []


def test_unresponsive_worker_counts_as_hung_and_loading_worker_later(yard: Yard) -> None:
    hung, wakes, loading = yard.serving("w1"), yard.serving("w2"), yard.hello("w3")
    yard.now += SILENT_S + 1
    yard.fleet.sweep(yard.now)
    yard.beat(wakes)
    yard.now += 2
    yard.fleet.sweep(yard.now)
    assert yard.fleet.hung(yard.now, after_s=2) == []
    yard.now += 0.5
    yard.beat(wakes)
    yard.fleet.sweep(yard.now)
    assert yard.fleet.hung(yard.now, after_s=2) == [hung]
    yard.now += 2 * LOADING_PATIENCE
    yard.fleet.sweep(yard.now)
    assert set(yard.fleet.hung(yard.now, after_s=2)) >= {hung, loading}


# --- choice of a worker ------------------------------------------------------------------------------


def test_a_request_goes_where_the_fewest_are_aboard_of_those_that_serve(yard: Yard) -> None:
    small = yard.serving("w0", "small")
    assert yard.find("small") is yard.find(None) is small
    workers = [yard.serving(f"w{n}") for n in (1, 2, 3)]
    yard.assigned.update(w1=3, w2=1, w3=2)
    assert yard.find("m") is workers[1]
    yard.assigned.update(w2=3)
    assert yard.find("m") is workers[2]
    yard.hello("loading")
    yard.now += SILENT_S + 1
    yard.beat(workers[0], running=9, steps=1)
    yard.fleet.sweep(yard.now)
    assert workers[2].verdict is HealthState.SILENT
    assert yard.find("m") is workers[0], "the others do not serve, however idle"


def test_a_model_nobody_has_named_does_not_exist(yard: Yard) -> None:
    yard.serving("w1", "small")
    yard.serving("w2", "large")
    error = yard.refusal("huge")
    assert error.code is Code.MODEL_NOT_FOUND
    assert error.param == "model"
    assert error.retry_after_s is None
    assert error.message == "The model `huge` does not exist here. Available: large, small."


def test_a_model_that_loads_says_how_far_it_is(yard: Yard) -> None:
    worker = yard.hello()
    error = yard.refusal("m")
    assert error.code is Code.MODEL_LOADING
    assert error.message == "m is loading."
    assert error.retry_after_s == RETRY_LOADING_S_DEFAULT
    yard.fleet.loading(worker, Loading(incarnation="w", done=33, total=100))
    yard.now += 2
    assert yard.refusal(None).message == "m is loading (33%)."
    assert yard.refusal("m").retry_after_s == RETRY_LOADING_S_DEFAULT - 2


@pytest.mark.parametrize("outlived", [False, True])
def test_a_model_that_loads_again_is_expected_when_it_was_ready_the_last_time(
    outlived: bool, yard: Yard
) -> None:
    yard.load(yard.hello("w1"), seconds=30)
    if outlived:  # a worker that was loaded before the gateway started says nothing about loading
        yard.ready(yard.hello("w1"))
    yard.fleet.gone("w1")
    yard.hello("w2")
    for passed_s, expected in ((0, 30), (10, 20), (15, 5), (100, 1)):
        yard.now += passed_s
        assert yard.refusal("m").retry_after_s == pytest.approx(expected)


# --- information about a model -----------------------------------------------------------------------


def test_a_worker_can_do_nothing_before_it_is_ready(yard: Yard) -> None:
    worker = yard.hello()
    first_seen_at = yard.now
    assert not worker.serves
    assert worker.capabilities == Capabilities()
    assert yard.fleet.models["m"].context_length == 0
    capabilities = Capabilities(images=True, thinking=True)
    message = Ready(incarnation="w", model="m", context_length=8192, running_max=1, capabilities=capabilities)
    yard.now += 4
    yard.fleet.ready(worker, message, yard.now)
    assert worker.serves
    assert worker.capabilities == capabilities
    yard.serving("w2")
    assert yard.fleet.models["m"].first_seen_at == first_seen_at
    assert yard.fleet.models["m"].context_length == 8192
