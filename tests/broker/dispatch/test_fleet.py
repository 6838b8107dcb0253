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
    worker = yard.serving()
    assert yard.fleet.gone("w") is worker
    assert yard.fleet.get("w") is None
    assert list(yard.fleet) == []
    assert yard.fleet.gone("w") is None
    assert yard.fleet.models.keys() == {"m"}


def test_the_successor_of_a_dead_worker_serves(yard: Yard) -> None:
    yard.serving("w1")
    yard.fleet.gone("w1")
    successor = yard.serving("w2")
    assert yard.find("m") is successor


# --- silent ------------------------------------------------------------------------------------------


def test_a_worker_counts_as_silent_after_so_long_and_is_reported_once(yard: Yard) -> None:
    worker = yard.serving()
    yard.now += SILENT_S
    assert yard.fleet.sweep(yard.now) == []
    yard.now += 0.01
    assert yard.fleet.sweep(yard.now) == [worker]
    assert worker.verdict is HealthState.SILENT
    assert yard.fleet.sweep(yard.now + 100) == []
    assert yard.refusal("m").code is Code.WORKER_UNAVAILABLE


def test_a_silent_worker_that_speaks_again_serves_again(yard: Yard) -> None:
    worker = yard.serving()
    yard.now += 60
    assert yard.fleet.sweep(yard.now) == [worker]
    yard.beat(worker)
    assert yard.find("m") is worker
    assert yard.fleet.sweep(yard.now) == []


def test_a_silence_does_not_count_towards_a_stall(yard: Yard) -> None:
    worker = yard.serving()
    yard.beat(worker, running=1, steps=5)
    yard.now += STALL_S + 1
    assert yard.fleet.sweep(yard.now) == [worker]
    assert worker.verdict is HealthState.SILENT
    yard.beat(worker, running=1, steps=5)
    assert yard.fleet.sweep(yard.now) == []
    assert yard.find("m") is worker


def test_a_worker_that_falls_silent_twice_is_reported_twice(yard: Yard) -> None:
    worker = yard.serving()
    for _ in range(2):
        yard.now += 60
        assert yard.fleet.sweep(yard.now) == [worker]
        yard.beat(worker)


# --- stalled -----------------------------------------------------------------------------------------


def stall(yard: Yard, worker: Worker, seconds: float) -> None:
    """Send heartbeats whose step count does not advance."""
    until = yard.now + seconds
    while yard.now < until:
        yard.now = min(until, yard.now + 1.0)
        yard.beat(worker, running=2, steps=5)


def test_a_worker_counts_as_stalled_when_rows_run_and_no_step_is_made(yard: Yard) -> None:
    worker = yard.serving()
    yard.beat(worker, running=2, steps=5)
    stall(yard, worker, STALL_S)
    assert yard.fleet.sweep(yard.now) == []
    stall(yard, worker, 1)
    assert yard.fleet.sweep(yard.now) == [worker]
    assert worker.verdict is HealthState.STALLED
    assert yard.fleet.sweep(yard.now) == []
    assert yard.refusal("m").code is Code.WORKER_UNAVAILABLE


def test_a_stalled_worker_that_steps_again_serves_again(yard: Yard) -> None:
    worker = yard.serving()
    yard.beat(worker, running=2, steps=5)
    stall(yard, worker, STALL_S + 1)
    assert yard.fleet.sweep(yard.now) == [worker]
    yard.beat(worker, running=2, steps=6)
    assert yard.fleet.sweep(yard.now) == []
    assert yard.find("m") is worker


def test_a_stalled_worker_that_merely_speaks_is_not_taken_back(yard: Yard) -> None:
    worker = yard.serving()
    yard.beat(worker, running=2, steps=5)
    stall(yard, worker, STALL_S + 1)
    yard.fleet.sweep(yard.now)
    yard.beat(worker, running=2, steps=5)
    assert not worker.serves
    assert yard.refusal("m").code is Code.WORKER_UNAVAILABLE


def test_an_idle_worker_is_never_stalled(yard: Yard) -> None:
    worker = yard.serving()
    for _ in range(10):
        yard.now += SILENT_S
        yard.beat(worker, running=0, steps=5)
        yard.now += STALL_S
        yard.beat(worker, running=0, steps=5)
        assert yard.fleet.sweep(yard.now) == []


def test_the_time_a_worker_was_idle_does_not_count_towards_a_stall(yard: Yard) -> None:
    worker = yard.serving()
    yard.beat(worker, running=0, steps=5)
    yard.now += 10 * STALL_S
    yard.beat(worker, running=0, steps=5)
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


def test_a_request_goes_to_a_worker_of_its_model(yard: Yard) -> None:
    small, large = yard.serving("w1", "small"), yard.serving("w2", "large")
    assert yard.find("small") is small
    assert yard.find("large") is large


def test_a_request_without_a_model_goes_to_any_worker(yard: Yard) -> None:
    worker = yard.serving("w1", "small")
    assert yard.find(None) is worker


def test_a_request_goes_where_the_fewest_are_aboard(yard: Yard) -> None:
    workers = [yard.serving(f"w{n}") for n in range(3)]
    yard.assigned.update(w0=3, w1=1, w2=2)
    assert yard.find("m") is workers[1]
    yard.assigned.update(w1=3)
    assert yard.find("m") is workers[2]


def test_a_worker_that_does_not_serve_is_passed_over_however_idle(yard: Yard) -> None:
    busy, _loading = yard.serving("w1"), yard.hello("w2")
    silent = yard.serving("w3")
    yard.now += SILENT_S + 1
    yard.assigned.update(w1=9)
    yard.beat(busy, running=9, steps=1)
    yard.fleet.sweep(yard.now)
    assert silent.verdict is HealthState.SILENT
    assert yard.find("m") is busy


def test_a_model_nobody_has_named_does_not_exist(yard: Yard) -> None:
    yard.serving("w1", "small")
    yard.serving("w2", "large")
    error = yard.refusal("huge")
    assert error.code is Code.MODEL_NOT_FOUND
    assert error.param == "model"
    assert error.retry_after_s is None
    assert error.message == "The model `huge` does not exist here. Available: large, small."


def test_before_any_worker_came_no_model_is_ruled_out(yard: Yard) -> None:
    error = yard.refusal("m")
    assert error.code is Code.WORKER_UNAVAILABLE
    assert error.retry_after_s == RETRY_ABSENT_S


def test_a_model_whose_worker_is_gone_is_unavailable_and_expected_back(yard: Yard) -> None:
    yard.serving()
    yard.fleet.gone("w")
    error = yard.refusal("m")
    assert error.code is Code.WORKER_UNAVAILABLE
    assert error.retry_after_s == RETRY_ABSENT_S
    assert "`m`" in error.message


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


def test_a_model_that_loads_again_is_expected_when_it_was_ready_the_last_time(yard: Yard) -> None:
    yard.load(yard.hello("w1"), seconds=30)
    yard.fleet.gone("w1")
    yard.hello("w2")
    yard.now += 10
    assert yard.refusal("m").retry_after_s == pytest.approx(20)
    yard.now += 15
    assert yard.refusal("m").retry_after_s == pytest.approx(5)
    yard.now += 100
    assert yard.refusal("m").retry_after_s == 1.0


def test_a_worker_that_was_ready_when_it_came_says_nothing_about_loading(yard: Yard) -> None:
    # It outlived the previous gateway, and its model is loaded.
    yard.load(yard.hello("w1"), seconds=30)
    yard.ready(yard.hello("w1"))
    yard.fleet.gone("w1")
    yard.hello("w2")
    assert yard.refusal("m").retry_after_s == pytest.approx(30)


def test_a_silent_worker_is_not_said_to_be_loading(yard: Yard) -> None:
    yard.hello()
    yard.now += SILENT_S + 1
    yard.fleet.sweep(yard.now)
    assert yard.refusal("m").code is Code.WORKER_UNAVAILABLE


# --- information about a model -----------------------------------------------------------------------


def test_a_model_is_known_from_its_first_hello_on(yard: Yard) -> None:
    worker = yard.hello()
    first_seen_at = yard.now
    assert yard.fleet.models["m"].context_length == 0
    yard.load(worker)
    yard.serving("w2")
    assert yard.fleet.models["m"].first_seen_at == first_seen_at
    assert yard.fleet.models["m"].context_length == 8192


def test_a_worker_can_do_nothing_before_it_is_ready(yard: Yard) -> None:
    worker = yard.hello()
    assert not worker.serves
    assert worker.capabilities == Capabilities()
    message = Ready(
        incarnation="w",
        model="m",
        context_length=1,
        running_max=1,
        capabilities=Capabilities(images=True, thinking=True),
    )
    yard.fleet.ready(worker, message, yard.now)
    assert worker.serves
    assert worker.capabilities == Capabilities(images=True, thinking=True)
