"""The job of a worker with a spare, as a service manager runs it: real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.supervisor import control
from deploy.supervisor.models import ServedModel
from deploy.supervisor.restarts import RestartLimits
from deploy.units import kept
from protocol import sockets
from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.system import Process, System, eventually, running_system

WITHIN_S = 60.0
LIMITS = RestartLimits(deaths_max=2, delay_s_max=0.2)


class Job:
    """What the manager would run, beside a gateway."""

    def __init__(self, system: System, folder: Path, flags: str = "--step-ms 10") -> None:
        worker = ["-m", "worker.fake", f"--endpoint={system.endpoint}", *flags.split()]
        command = kept.command(
            [sys.executable, *worker],
            port=system.port,
            model=ServedModel(name="fake"),
            stop_timeout_s=10.0,
            ready_timeout_s=30.0,
            limits=LIMITS,
            log_format=None,
            log_level=None,
        )
        self.system = system
        self.process = Process("job", command[command.index("-m") + 1 :], folder)

    def serving(self) -> list[int]:
        workers = self.system.http.get("/v1/status").json()["workers"]
        return [worker["pid"] for worker in workers if worker["state"] == "ready"]

    def spare(self) -> int:
        """Of the one that waits now."""

        def there() -> int | None:
            found = re.findall(r"spare is there as pid (\d+)", self.process.log())
            waits = found and int(found[-1]) not in self.serving() and psutil.pid_exists(int(found[-1]))
            return int(found[-1]) if waits else None

        found = eventually(there, within_s=WITHIN_S, what="the spare is there")
        assert found is not None
        return found

    def family(self) -> list[psutil.Process]:
        return list(self.process.stats.children(recursive=True))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with running_system(tmp_path) as system:
        found = Job(system, tmp_path)
        try:
            yield found
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.process.stop()


def test_a_worker_that_dies_is_what_the_spare_was_within_the_one_job(job: Job) -> None:
    spare = job.spare()
    (worker,) = job.serving()
    stream = ask(job.system.url, "!tokens=60")
    wait_until_flowing([stream])
    os.kill(worker, signal.SIGKILL)
    wait_for([stream], 60)
    assert stream.texts == [scripted("!tokens=60", 60)]
    assert job.serving() == [spare]
    assert {process.ppid() for process in job.family()} == {job.process.pid}


def test_a_reload_finds_it_and_costs_no_request(job: Job) -> None:
    spare = job.spare()
    stream = ask(job.system.url, "!tokens=100")
    wait_until_flowing([stream])
    done, text = control.order(sockets.runtime_directory() / f"serve-{job.system.port}")
    assert (done, text) == (True, "worker-2 has taken over from worker")
    wait_for([stream], 60)
    assert stream.texts == [scripted("!tokens=100", 100)]
    assert job.serving() == [spare]


def test_told_to_stop_it_ends_all_and_with_status_0(job: Job) -> None:
    job.spare()
    family = job.family()
    assert len(family) == 2
    job.process.kill(signal.SIGTERM)
    assert job.process.wait(WITHIN_S) == 0
    assert not any(process.is_running() for process in family)


def test_none_outlives_it(job: Job) -> None:
    job.spare()
    family = job.family()
    job.process.kill()
    job.process.wait(WITHIN_S)
    eventually(lambda: not any(map(psutil.Process.is_running, family)), within_s=WITHIN_S, what="their end")


@pytest.mark.parametrize(("flags", "status"), [("--crowded", 0), ("--broken", 78)])
def test_what_no_restart_helps_ends_it_so_that_the_manager_leaves_it_at_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, status: int
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with running_system(tmp_path) as system:
        job = Job(system, tmp_path, flags)
        assert job.process.wait(WITHIN_S) == status
        assert ("given up; `roundhouse service install`" in job.process.log()) == (status == 0)
