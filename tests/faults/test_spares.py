"""A supervisor with a spare: assignments, and recovery after kills of any process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from tests.faults.several import Scripted, Several, several
from tests.faults.spares import PROGRAM, besiege
from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.system import eventually

WITHIN_S = 60.0


def spare_of(served: Several) -> psutil.Process:
    """Wait for an unassigned spare that has reported ready, and return it."""
    found = eventually(served.there, within_s=WITHIN_S, what="the spare is there")
    assert found is not None
    return psutil.Process(found)


def wait_until_served_by(served: Several, model: str, pid: int) -> None:
    """Wait until the gateway has this process as the only worker of the model."""
    eventually(lambda: served.pids(model) == [pid], within_s=WITHIN_S, what=f"{pid} alone serves {model}")


def test_the_spare_becomes_the_worker_that_has_died_and_streams_go_on(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("fake", "--step-ms 20"), spare=True) as served:
        spare = spare_of(served)
        (worker,) = served.pids("fake")
        stream = ask(served.url, "!tokens=100")
        wait_until_flowing([stream])
        os.kill(worker, signal.SIGKILL)
        wait_for([stream], 60)
        assert stream.texts == [scripted("!tokens=100", 100)]
        wait_until_served_by(served, "fake", spare.pid)
        assert spare_of(served).pid not in (spare.pid, worker)


def test_a_reload_and_a_model_on_demand_take_it_too(tmp_path: Path) -> None:
    models = Scripted("first", resident=True), Scripted("second")
    with several(tmp_path, *models, spare=True) as served:
        spare = spare_of(served)
        assert served.reload("first")[0]
        wait_until_served_by(served, "first", spare.pid)
        spare = spare_of(served)
        stream = ask(served.url, "!tokens=5", model="second")
        wait_for([stream], 60)
        assert stream.texts == [scripted("!tokens=5", 5)]
        assert served.pids("second") == [spare.pid]


def test_a_spare_that_hangs_costs_no_more_than_the_old_way(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("fake", "--step-ms 20"), spare=True) as served:
        spare = spare_of(served)
        spare.suspend()
        stream = ask(served.url, "!tokens=100")
        wait_until_flowing([stream])
        os.kill(served.pids("fake")[0], signal.SIGKILL)
        wait_for([stream], 60)
        assert stream.texts == [scripted("!tokens=100", 100)]
        eventually(lambda: not spare.is_running(), within_s=WITHIN_S, what="the spare is killed")
        assert "the spare does not respond" in served.process.log()


def test_a_spare_that_is_killed_is_replaced_and_nobody_notices(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("fake"), spare=True) as served:
        spare = spare_of(served)
        (worker,) = served.pids("fake")
        spare.kill()
        spare.wait(WITHIN_S)
        assert spare_of(served).pid != spare.pid
        assert served.pids("fake") == [worker]


def test_none_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("fake"), spare=True) as served:
        spare = spare_of(served)
        served.process.kill()
        assert spare.is_running()
        eventually(lambda: not spare.is_running(), within_s=WITHIN_S, what="the spare has exited")


def test_kills_at_random_leave_one_worker_one_spare_and_nothing_else(tmp_path: Path) -> None:
    outcome = besiege(tmp_path, kills=12, seed=5, warm=3)
    assert outcome.wrong == []
    assert outcome.grown == []
    assert outcome.most <= 2
    assert sum(outcome.kills.values()) == 15
    assert outcome.answers


def test_the_program_of_the_spare_is_the_workers(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("fake"), spare=True) as served:
        assert spare_of(served).cmdline()[-1] == PROGRAM
