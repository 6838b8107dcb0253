"""A supervisor with a spare: assignments, and recovery after kills of any process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.several import Scripted, Several, several
from tests.faults.spares import PROGRAM, besiege
from tests.faults.streams import Client, ask, scripted, wait_for, wait_until_flowing
from tests.system import eventually, stable

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """Run a model with a spare, and another one on request."""
    models = Scripted("first", "--step-ms 20", resident=True), Scripted("second")
    with several(tmp_path_factory.mktemp("spares"), *models, spare=True) as served:
        yield served


def spare_of(served: Several) -> psutil.Process:
    """Wait for an unassigned spare that has reported ready, and return it."""
    found = eventually(served.there, within_s=WITHIN_S, what="the spare is there")
    assert found is not None
    return psutil.Process(found)


def wait_until_served_by(served: Several, model: str, pid: int) -> None:
    """Wait until the gateway has this process as the only worker of the model."""
    eventually(lambda: served.pids(model) == [pid], within_s=WITHIN_S, what=f"{pid} alone serves {model}")


def stream_over_a_kill(served: Several) -> Client:
    """Kill the worker of `first` under a stream, and return the client with its answer."""
    wait_until_flowing([stream := ask(served.url, "!tokens=100", model="first")])
    os.kill(served.pids("first")[0], signal.SIGKILL)
    wait_for([stream], 60)
    return stream


def test_a_spare_that_is_killed_is_replaced_and_nobody_notices(served: Several) -> None:
    spare, workers = spare_of(served), served.pids("first")
    assert spare.cmdline()[-1] == PROGRAM
    spare.kill()
    spare.wait(WITHIN_S)
    assert spare_of(served).pid != spare.pid
    assert served.pids("first") == workers


def test_the_spare_becomes_the_worker_that_has_died_and_streams_go_on(served: Several) -> None:
    spare = spare_of(served)
    assert stream_over_a_kill(served).texts == [scripted("!tokens=100", 100)]
    wait_until_served_by(served, "first", spare.pid)
    assert spare_of(served).pid != spare.pid


def test_a_reload_and_a_model_on_demand_take_it_too(served: Several) -> None:
    spare = spare_of(served)
    assert served.reload("first")[0]
    wait_until_served_by(served, "first", spare.pid)
    spare = spare_of(served)
    wait_for([stream := ask(served.url, "!tokens=5", model="second")], 60)
    assert stream.texts == [scripted("!tokens=5", 5)]
    assert served.pids("second") == [spare.pid]


def test_a_spare_that_hangs_costs_no_more_than_the_old_way(served: Several) -> None:
    spare = spare_of(served)
    spare.suspend()
    assert stream_over_a_kill(served).texts == [scripted("!tokens=100", 100)]
    eventually(lambda: not spare.is_running(), within_s=WITHIN_S, what="the spare is killed")
    assert "the spare does not respond" in served.process.log()


def test_none_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("fake"), spare=True) as served:
        spare = spare_of(served)
        family = stable(
            lambda: served.process.stats.children(recursive=True),
            within_s=WITHIN_S,
            what="a gateway, a worker and the spare",
            accept=lambda found: len(found) == 3 and spare in found,
        )
        served.process.kill()
        served.process.wait()
        assert psutil.wait_procs(family, timeout=WITHIN_S)[1] == []


def test_kills_at_random_leave_one_worker_one_spare_and_nothing_else(tmp_path: Path) -> None:
    outcome = besiege(tmp_path, kills=5, seed=5, warm=1)
    assert outcome.wrong == []
    assert outcome.grown == []
    assert outcome.most <= 2
    assert sum(outcome.kills.values()) == 6
    assert outcome.answers
