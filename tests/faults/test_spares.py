"""A supervisor with a spare: assignments, and recovery after kills of any process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.several import Scripted, Several, several
from tests.faults.spares import besiege
from tests.faults.streams import Client, ask, scripted, wait_for, wait_until_flowing
from tests.system import eventually

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """Run a model with a spare, and another one on request."""
    models = Scripted("first", "--step-ms 20", resident=True), Scripted("second")
    with several(tmp_path_factory.mktemp("spares"), *models, spare=True) as served:
        yield served


def wait_until_served_by(served: Several, model: str, pid: int) -> None:
    """Wait until the gateway has this process as the only worker of the model."""
    eventually(lambda: served.pids(model) == [pid], within_s=WITHIN_S, what=f"{pid} alone serves {model}")


def stream_over_a_kill(served: Several) -> Client:
    """Kill the worker of `first` under a stream, and return the client with its answer."""
    wait_until_flowing([stream := ask(served.url, "!tokens=100", model="first")])
    os.kill(served.pids("first")[0], signal.SIGKILL)
    wait_for([stream], 60)
    return stream


def test_the_spare_becomes_the_worker_that_has_died_and_streams_go_on(served: Several) -> None:
    spare = served.wait_spare()
    assert stream_over_a_kill(served).texts == [scripted("!tokens=100", 100)]
    wait_until_served_by(served, "first", spare)
    assert served.wait_spare() != spare


def test_a_reload_and_a_model_on_demand_take_it_too(served: Several) -> None:
    spare = served.wait_spare()
    assert served.reload("first")[0]
    wait_until_served_by(served, "first", spare)
    spare = served.wait_spare()
    wait_for([stream := ask(served.url, "!tokens=5", model="second")], 60)
    assert stream.texts == [scripted("!tokens=5", 5)]
    assert served.pids("second") == [spare]


def test_a_spare_that_hangs_costs_no_more_than_the_old_way(served: Several) -> None:
    spare = psutil.Process(served.wait_spare())
    spare.suspend()
    assert stream_over_a_kill(served).texts == [scripted("!tokens=100", 100)]
    eventually(lambda: not spare.is_running(), within_s=WITHIN_S, what="the spare is killed")
    assert "the spare does not respond" in served.process.log()


def test_kills_at_random_leave_one_worker_one_spare_and_nothing_else(tmp_path: Path) -> None:
    outcome = besiege(tmp_path, kills=2, seed=5, warm=1)
    assert outcome.failures == []
    assert sum(outcome.kills.values()) == 3
    assert outcome.answers
