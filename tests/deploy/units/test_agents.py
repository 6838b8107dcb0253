"""Rendered plists under a small launchd, with a real gateway and the scripted worker."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deploy.units import service
from deploy.units.jobs import Job
from deploy.units.jobs import read as read_jobs
from deploy.units.launchd import PREFIX, Launchd
from tests.deploy.units.agents import Agent, Agents
from tests.faults import streams
from tests.system import START_S_MAX, eventually, free_port


@dataclass(slots=True)
class Installed:
    """Installation by `roundhouse service install`, with a client of its server."""

    home: Path
    manager: Launchd
    agents: Agents
    jobs: list[Job]
    http: httpx.Client

    def agent(self, name: str) -> Agent:
        return self.agents.loaded[PREFIX + name]

    def worker_pid(self) -> int | None:
        """Return the pid of the ready worker, or None."""
        with contextlib.suppress(httpx.TransportError):
            workers: list[dict[str, Any]] = self.http.get("/v1/status").json()["workers"]
            return next((worker["pid"] for worker in workers if worker["state"] == "ready"), None)
        return None

    def wait_ready(self) -> None:
        eventually(self.worker_pid, within_s=START_S_MAX, what=f"the worker is ready:\n{self.logs()}")

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.home.rglob("*.log"))


def scripted(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with the scripted engine in place of a model."""
    return [
        replace(job, argv=["tests.scripted_worker" if w == "worker" else w for w in job.argv]) for job in jobs
    ]


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Environment whose runtime folder is in the test's folder."""
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return {"XDG_RUNTIME_DIR": str(tmp_path / "run")}


@pytest.fixture
def installed(tmp_path: Path, environ: dict[str, str]) -> Iterator[Installed]:
    """Installation without a spare, in which the worker is the job itself."""
    with installing(tmp_path, environ, "--spare=0") as system:
        yield system


@contextlib.contextmanager
def installing(tmp_path: Path, environ: dict[str, str], *flags: str) -> Iterator[Installed]:
    """Install the service, wait until it is ready, and remove it afterwards."""
    port = free_port()
    agents, home = Agents(), tmp_path / "home"
    manager = Launchd(home, environ, os.getuid(), agents)
    jobs = scripted(read_jobs(["--port", str(port), *flags], environ))
    with contextlib.closing(agents), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        service.install(manager, jobs)
        system = Installed(home, manager, agents, jobs, http)
        system.wait_ready()
        yield system


def test_a_worker_that_is_killed_comes_back_and_the_gateway_stays(installed: Installed) -> None:
    gateway, worker = installed.agent("gateway").pid, installed.agent("worker").pid
    assert worker is not None
    assert installed.worker_pid() == worker
    os.kill(worker, signal.SIGKILL)
    eventually(
        lambda: installed.worker_pid() not in (None, worker), within_s=START_S_MAX, what="a new worker"
    )
    assert installed.agent("gateway").pid == gateway
    assert installed.agent("worker").starts == 2


def test_a_worker_with_a_spare_comes_back_within_its_job(tmp_path: Path, environ: dict[str, str]) -> None:
    with installing(tmp_path, environ) as system:
        agent, worker = system.agent("worker"), system.worker_pid()
        assert agent.pid is not None
        assert worker is not None
        assert psutil.Process(worker).ppid() == agent.pid
        eventually(lambda: "spare is ready" in system.logs(), within_s=START_S_MAX, what="the spare is ready")
        os.kill(worker, signal.SIGKILL)
        eventually(
            lambda: system.worker_pid() not in (None, worker), within_s=START_S_MAX, what="a new worker"
        )
        assert "which was the spare" in system.logs()
        assert agent.starts == 1


def test_a_gateway_that_is_killed_comes_back_refuses_nobody_and_finds_its_worker(
    installed: Installed,
) -> None:
    gateway, worker = installed.agent("gateway").pid, installed.agent("worker").pid
    assert gateway is not None
    os.kill(gateway, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(gateway), within_s=10, what="the gateway is gone")
    # Sent while no gateway runs: the connection waits for the next one.
    assert httpx.get(installed.http.base_url.join("/health"), timeout=START_S_MAX).status_code == 200
    installed.wait_ready()
    assert installed.worker_pid() == worker == installed.agent("worker").pid
    assert installed.agent("worker").starts == 1


def test_a_worker_that_is_asked_to_stop_stays_stopped_and_status_says_so(installed: Installed) -> None:
    worker = installed.agent("worker")
    assert worker.pid is not None
    lines, runs = service.status(installed.manager)
    assert runs
    assert f"worker     is running as pid {worker.pid} since " in lines[1]
    os.kill(worker.pid, signal.SIGTERM)
    eventually(lambda: worker.pid is None, within_s=10, what="the worker has ended")
    lines, runs = service.status(installed.manager)
    assert (lines[1], runs, worker.starts) == ("worker     is not running; last exit: 0", False, 1)


def test_a_reload_lets_the_worker_end_its_requests_and_starts_it_anew(installed: Installed) -> None:
    gateway, worker = installed.agent("gateway").pid, installed.agent("worker").pid
    text = "!tokens=100 !slow=20"
    client = streams.ask(str(installed.http.base_url).rstrip("/"), text)
    streams.wait_until_flowing([client])
    assert service.reload(installed.manager) == [f"{PREFIX}worker.plist"]
    streams.wait_for([client], 30)
    assert client.texts == [streams.scripted(text, 100)]
    installed.wait_ready()
    assert installed.worker_pid() not in (None, worker)
    assert installed.agent("gateway").pid == gateway


def test_a_reload_of_the_gateway_finishes_its_streams_and_lets_clients_wait(installed: Installed) -> None:
    gateway, worker = installed.agent("gateway").pid, installed.agent("worker").pid
    url, text = str(installed.http.base_url).rstrip("/"), "!tokens=100 !slow=20"
    client = streams.ask(url, text)
    streams.wait_until_flowing([client])
    reload = threading.Thread(target=service.reload, args=(installed.manager,), kwargs={"gateway": True})
    reload.start()
    late = streams.ask(url, "!tokens=5")
    streams.wait_for([client, late], 30)
    reload.join(30)
    assert [*client.texts, *late.texts] == [streams.scripted(text, 100), streams.scripted("!tokens=5", 5)]
    agent = installed.agent("gateway")
    eventually(lambda: agent.pid not in (None, gateway), within_s=30, what="another gateway runs")
    assert installed.agent("worker").pid == worker


def test_installing_again_restarts_what_has_changed_and_nothing_else(installed: Installed) -> None:
    gateway, worker = installed.agent("gateway").pid, installed.agent("worker").pid
    installed.agents.commands.clear()
    assert service.install(installed.manager, installed.jobs) == []
    assert installed.agents.commands == []
    changed = [
        replace(job, argv=[*job.argv, "--step-ms=1"]) if job.name == "worker" else job
        for job in installed.jobs
    ]
    assert service.install(installed.manager, changed) == [f"{PREFIX}worker.plist"]
    assert installed.agent("gateway").pid == gateway
    eventually(
        lambda: installed.worker_pid() not in (None, worker), within_s=START_S_MAX, what="a new worker"
    )
    assert service.install(installed.manager, changed[:1]) == []
    assert list(installed.agents.loaded) == [f"{PREFIX}gateway"]


def test_removed_it_leaves_no_process_no_socket_and_no_file(installed: Installed) -> None:
    pids = [installed.agent(name).pid for name in ("gateway", "worker")]
    assert sorted(service.remove(installed.manager)) == [f"{PREFIX}gateway.plist", f"{PREFIX}worker.plist"]
    assert not any(psutil.pid_exists(pid) for pid in pids if pid is not None)
    assert [path for path in installed.home.rglob("*") if not path.is_dir()] == []
    assert not (installed.home / "Library" / "Logs" / "roundhouse").exists()
    with pytest.raises(httpx.ConnectError):
        installed.http.get("/health")
    assert service.status(installed.manager) == (["nothing is installed"], False)
    assert service.remove(installed.manager) == []


def test_misconfigured_agent_gives_up_after_the_crash_limit(tmp_path: Path, environ: dict[str, str]) -> None:
    agents = Agents(throttle_s=0.0)
    manager = Launchd(tmp_path, environ, os.getuid(), agents)
    jobs = read_jobs(["--port", str(free_port()), "--deaths-max=2", "--spare=0"], environ)
    broken = [replace(job, argv=[*job.argv, "--no-such-flag"]) for job in jobs if job.name == "worker"]
    with contextlib.closing(agents):
        service.install(manager, broken)
        agent = agents.loaded[f"{PREFIX}worker"]
        eventually(lambda: agent.last_exit == 0, within_s=START_S_MAX, what="the job exits with success")
        assert agent.starts == 4  # first start, two restarts, and the start that gives up
        (line,), runs = service.status(manager)
        assert not runs
        assert "started 3 times within 300 s, giving up" in line
        assert (tmp_path / "Library/Logs/roundhouse/worker.log").read_text().count("no-such-flag") == 3
        # A new installation, with better flags or not, gets new attempts.
        service.install(manager, [replace(job, argv=[*job.argv, "--again"]) for job in broken])
        again = agents.loaded[f"{PREFIX}worker"]
        eventually(lambda: again.starts >= 2, within_s=START_S_MAX, what="the job is started again")
