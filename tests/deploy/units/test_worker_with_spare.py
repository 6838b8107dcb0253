"""Job of a worker with a spare, as run by a service manager, with real processes and signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from deploy.supervisor import control
from deploy.units import worker_with_spare
from deploy.units.worker_with_spare import JobSettings
from protocol import sockets
from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.system import Process, System, eventually, running_system, stable

WITHIN_S = 60.0
FAMILY = 2
"""Number of processes below the job: the worker and the spare."""


class Job:
    """Job that the service manager would run, beside a gateway."""

    def __init__(
        self, system: System, folder: Path, flags: str = "--step-ms 10", shim: Sequence[str] = ()
    ) -> None:
        worker = ["-m", "tests.scripted_worker", f"--endpoint={system.endpoint}", *flags.split()]
        job = JobSettings(
            host="127.0.0.2",
            port=system.port,
            name="fake",
            stop_timeout=10.0,
            ready_timeout=30.0,
            deaths_max=2,
            restart_delay_max=0.2,
        )
        command = worker_with_spare.command([sys.executable, *worker], job)
        words = command[command.index("deploy.units.worker_with_spare") + 1 :]
        self.system = system
        self.process = Process("job", [*shim, "tests.deploy.units.scripted_job", *words], folder)

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


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Yield a gateway, whose workers are those of jobs."""
    with running_system(tmp_path_factory.mktemp("system")) as system:
        yield system


@contextlib.contextmanager
def running_job(
    system: System, folder: Path, flags: str = "--step-ms 10", shim: Sequence[str] = ()
) -> Iterator[Job]:
    job = Job(system, folder, flags, shim)
    try:
        yield job
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            job.process.stop()


@pytest.fixture(autouse=True)
def _runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_spare_takes_over_after_a_death_and_at_a_reload_until_a_stop(system: System, tmp_path: Path) -> None:
    with running_job(system, tmp_path) as job:
        _spare_takes_over(job, lambda: os.kill(job.serving()[0], signal.SIGKILL), tokens=60)
        assert {process.ppid() for process in job.family()} == {job.process.pid}
        folder = sockets.control_path(f"{job.system.port}-127.0.0.2")
        answers: list[tuple[bool, str]] = []
        _spare_takes_over(job, lambda: answers.append(control.order(folder)), tokens=100)
        assert answers == [(True, "worker-2 has taken over from worker")]
        job.spare()
        family = job.family()
        job.process.kill(signal.SIGTERM)
        assert job.process.wait(WITHIN_S) == 0
        assert not any(process.is_running() for process in family)


def _spare_takes_over(job: Job, act: Callable[[], object], tokens: int) -> None:
    """Act while a request runs, and assert that it is answered whole, and that the spare serves."""
    spare, text = job.spare(), f"!tokens={tokens}"
    stream = ask(job.system.url, text)
    wait_until_flowing([stream])
    act()
    wait_for([stream], WITHIN_S)
    assert stream.texts == [scripted(text, tokens)]
    assert job.serving() == [spare]


def test_model_that_cannot_be_loaded_is_not_restarted_by_launchd_either(
    system: System, tmp_path: Path
) -> None:
    shim = ["deploy.units.launchd_shim", f"--starts-file={tmp_path / 'starts'}", "--starts-max=9", "--"]
    with running_job(system, tmp_path, "--broken", shim=[*shim, sys.executable, "-m"]) as broken:
        assert broken.process.wait(WITHIN_S) == 0
        assert "exited with status 78" in broken.process.log()


def test_incurable_failure_exits_so_that_the_manager_does_not_restart(system: System, tmp_path: Path) -> None:
    with running_job(system, tmp_path, "--broken") as broken:
        assert broken.process.wait(WITHIN_S) == 78
        assert "giving up" not in broken.process.log()
        crowded = Job(broken.system, tmp_path, "--crowded")
        assert crowded.process.wait(WITHIN_S) == 0
        assert "giving up; `roundhouse service install`" in crowded.process.log()
