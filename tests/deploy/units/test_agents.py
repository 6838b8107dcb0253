"""Rendered plists under a small launchd, with a real gateway and the scripted worker."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deploy.units import launchd, service
from deploy.units.jobs import Job
from deploy.units.jobs import read as read_jobs
from deploy.units.launchd import PREFIX, Launchd
from deploy.units.manager import ServiceError
from protocol import sockets
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
        with contextlib.suppress(httpx.TransportError):
            workers: list[dict[str, Any]] = self.http.get("/v1/status").json()["workers"]
            return next((worker["pid"] for worker in workers if worker["state"] == "ready"), None)
        return None

    def wait_ready(self) -> None:
        eventually(self.worker_pid, within_s=START_S_MAX, what=f"the worker is ready:\n{self.logs()}")

    def wait_for_another(self, worker: int | None) -> None:
        eventually(
            lambda: self.worker_pid() not in (None, worker), within_s=START_S_MAX, what="another worker"
        )

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.home.rglob("*.log"))


def scripted(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with the scripted engine in place of a model."""
    return [
        replace(job, argv=["tests.scripted_worker" if w == "worker" else w for w in job.argv]) for job in jobs
    ]


@contextlib.contextmanager
def installing(folder: Path, *flags: str, at_boot: bool = False) -> Iterator[Installed]:
    """Install the service, wait until it is ready, and remove it afterwards."""
    port, environ, home = free_port(), {"XDG_RUNTIME_DIR": str(folder)}, folder / "home"
    domain = launchd.agents(home, environ, os.getuid())
    if at_boot:
        domain = launchd.daemons(living_in(home), home / "Library")
    running = Agents(domain.target)
    manager = Launchd(domain, running)
    with manager.acting():
        jobs = scripted(read_jobs(["--port", str(port), *flags], environ))
    with contextlib.closing(running), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        service.install(manager, jobs)
        system = Installed(home, manager, running, jobs, http)
        system.wait_ready()
        yield system


def living_in(home: Path) -> pwd.struct_passwd:
    """Return this user with another home."""
    home.mkdir(mode=0o700)
    return pwd.struct_passwd((*pwd.getpwuid(os.getuid())[:5], str(home), "/bin/sh"))


def killed(system: Installed) -> None:
    worker = system.worker_pid()
    os.kill(worker, signal.SIGKILL)
    system.wait_for_another(worker)


@pytest.mark.usefixtures("runtime_folder")
def test_killed_job_comes_back_and_the_other_stays(tmp_path: Path) -> None:
    with installing(tmp_path, "--spare=0") as system:
        gateway, worker = system.agent("gateway"), system.agent("worker")
        first = gateway.pid
        assert system.worker_pid() == worker.pid
        killed(system)
        assert (gateway.pid, worker.starts) == (first, 2)

        _kill_gateway(system)
        assert (system.worker_pid(), worker.starts) == (worker.pid, 2)

        _reload_the_gateway(system)
        _reload_and_reinstall(system)
        _stop_and_remove(system)


def test_daemons_need_no_login_and_live_in_the_home_of_their_user(tmp_path: Path) -> None:
    with installing(tmp_path, "--spare=0", at_boot=True) as system:
        assert system.agent("worker").plist["EnvironmentVariables"]["HOME"] == str(system.home)
        assert [path.name for path in system.manager.folder.iterdir()] == [
            f"{PREFIX}{name}.plist" for name in ("gateway", "worker")
        ]
        service.remove(system.manager)
        assert [path for path in (system.home / "Library").rglob("*") if not path.is_dir()] == []


def test_settings_of_daemons_are_read_as_their_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        user = living_in(Path(folder) / "home")
        if os.geteuid() == 0:
            Path(folder).chmod(0o755)
            user = pwd.struct_passwd((*pwd.getpwnam("nobody")[:5], *user[5:]))
            os.chown(user.pw_dir, user.pw_uid, user.pw_gid)
        before = (os.geteuid(), os.getegid(), Path.home())
        with launchd.acting_as(user):
            assert sockets.runtime_directory().is_relative_to(user.pw_dir)
            assert os.geteuid() == sockets.runtime_directory().stat().st_uid == user.pw_uid
        assert (os.geteuid(), os.getegid(), Path.home()) == before
        monkeypatch.setattr("deploy.units.launchd.SOURCE_FOLDER", Path(folder) / "none")
        with (
            pytest.raises(ServiceError, match="install Roundhouse in a folder that all can read"),
            Launchd(launchd.daemons(user)).acting(),
        ):
            pass
    with pytest.raises(ServiceError, match="--user NAME, not root"), Launchd(launchd.daemons(None)).acting():
        pass


def _kill_gateway(system: Installed) -> None:
    gateway = system.agent("gateway").pid
    os.kill(gateway, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(gateway), within_s=START_S_MAX, what="the gateway is gone")
    # Sent while no gateway runs: the connection waits for the next one.
    assert httpx.get(system.http.base_url.join("/health"), timeout=START_S_MAX).status_code == 200
    system.wait_ready()


def _reload_the_gateway(system: Installed) -> None:
    """A reload of the gateway finishes its streams, and clients that come wait."""
    agent, worker, text = system.agent("gateway"), system.worker_pid(), "!tokens=100 !slow=20"
    gateway, url = agent.pid, str(system.http.base_url).rstrip("/")
    client = streams.ask(url, text)
    streams.wait_until_flowing([client])
    reload = threading.Thread(target=service.reload, args=(system.manager,), kwargs={"gateway": True})
    reload.start()
    late = streams.ask(url, "!tokens=5")
    streams.wait_for([client, late], START_S_MAX)
    reload.join(START_S_MAX)
    assert [*client.texts, *late.texts] == [streams.scripted(text, 100), streams.scripted("!tokens=5", 5)]
    eventually(lambda: agent.pid not in (None, gateway), within_s=START_S_MAX, what="another gateway runs")
    system.wait_ready()
    assert system.worker_pid() == worker


def _reload_and_reinstall(system: Installed) -> None:
    """A reload lets the worker end its requests; an installation restarts only what has changed."""
    gateway, worker, text = system.agent("gateway").pid, system.worker_pid(), "!tokens=100 !slow=20"
    client = streams.ask(str(system.http.base_url).rstrip("/"), text)
    streams.wait_until_flowing([client])
    assert service.reload(system.manager) == [f"{PREFIX}worker.plist"]
    streams.wait_for([client], START_S_MAX)
    assert client.texts == [streams.scripted(text, 100)]
    system.wait_for_another(worker)

    worker = system.worker_pid()
    system.agents.commands.clear()
    assert service.install(system.manager, system.jobs) == []
    assert system.agents.commands == []
    changed = [
        replace(job, argv=[*job.argv, "--step-ms=1"]) if job.name == "worker" else job for job in system.jobs
    ]
    assert service.install(system.manager, changed) == [f"{PREFIX}worker.plist"]
    system.wait_for_another(worker)
    assert system.agent("gateway").pid == gateway


def _stop_and_remove(system: Installed) -> None:
    """A worker that is asked to stop stays stopped; after the removal nothing is left."""
    worker = system.agent("worker")
    lines, runs = service.status(system.manager)
    assert runs
    assert f"worker     is running as pid {worker.pid} since " in lines[1]
    os.kill(worker.pid, signal.SIGTERM)
    eventually(lambda: worker.pid is None, within_s=START_S_MAX, what="the worker has ended")
    lines, runs = service.status(system.manager)
    assert (lines[1], runs, worker.starts) == ("worker     is not running; last exit: 0", False, 1)

    gateway = system.agent("gateway").pid
    assert sorted(service.remove(system.manager)) == [f"{PREFIX}gateway.plist", f"{PREFIX}worker.plist"]
    assert not psutil.pid_exists(gateway)
    assert [path for path in system.home.rglob("*") if not path.is_dir()] == []
    assert not (system.home / "Library" / "Logs" / "roundhouse").exists()
    with pytest.raises(httpx.ConnectError):
        system.http.get("/health")
    assert service.status(system.manager) == (["nothing is installed"], False)
    assert service.remove(system.manager) == []
