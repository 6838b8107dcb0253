"""Job of a worker with a spare, as run by a service manager, with real processes and signals."""

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
from deploy.supervisor.child import ServedModel
from deploy.supervisor.restarts import RestartLimits
from deploy.units import worker_with_spare
from protocol import sockets
from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.system import Process, System, eventually, running_system, stable

WITHIN_S = 60.0
FAMILY = 2
"""Number of processes below the job: the worker and the spare."""
LIMITS = RestartLimits(deaths_max=2, delay_s_max=0.2)


class Job:
    """Job that the service manager would run, beside a gateway."""

    def __init__(self, system: System, folder: Path, flags: str = "--step-ms 10") -> None:
        worker = ["-m", "tests.scripted_worker", f"--endpoint={system.endpoint}", *flags.split()]
        command = worker_with_spare.command(
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
        """Wait for a ready spare, and return its pid."""

        def there() -> int | None:
            found = re.findall(r"spare is ready as pid (\d+)", self.process.log())
            waits = found and int(found[-1]) not in self.serving() and psutil.pid_exists(int(found[-1]))
            return int(found[-1]) if waits else None

        found = eventually(there, within_s=WITHIN_S, what="the spare is ready")
        assert found is not None
        return found

    def family(self) -> list[psutil.Process]:
        """Wait until worker and spare are the only children, and return them.

        Helper programs of a starting process and processes that are ending are children for a moment.
        """
        return stable(
            lambda: list(self.process.stats.children(recursive=True)),
            within_s=WITHIN_S,
            what="the job has a worker and a spare and no other process",
            accept=lambda found: len(found) == FAMILY,
        )


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
    job.process.kill(signal.SIGTERM)
    assert job.process.wait(WITHIN_S) == 0
    assert not any(process.is_running() for process in family)


def test_none_outlives_it(job: Job) -> None:
    job.spare()
    family = job.family()
    job.process.kill()
    job.process.wait(WITHIN_S)
    eventually(
        lambda: not any(map(psutil.Process.is_running, family)),
        within_s=WITHIN_S,
        what="the job has ended",
    )


@pytest.mark.parametrize(("flags", "status"), [("--crowded", 0), ("--broken", 78)])
def test_incurable_failure_exits_so_that_the_manager_does_not_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, status: int
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with running_system(tmp_path) as system:
        job = Job(system, tmp_path, flags)
        assert job.process.wait(WITHIN_S) == status
        assert ("giving up; `roundhouse service install`" in job.process.log()) == (status == 0)
