"""`roundhouse reload` and SIGTERM under streams: no request fails, and every text is undisturbed."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from deploy.supervisor import control
from deploy.supervisor.reloading import ReloadOrder
from tests.faults.serving import serving
from tests.faults.streams import Client, ask, scripted, wait_for, wait_until_flowing
from tests.faults.test_flights import ask_many, assert_undisturbed
from tests.system import chat_body, eventually, running_system

STEP = "--step-ms 5"
NO_TIME = f"{STEP} --drain-timeout 0"
TOKENS = 400
MANY_TOKENS = 700
"""Answers outlast the start of another worker, on which they continue."""


def ask_16(url: str, tokens: int = TOKENS) -> list[Client]:
    """Start 16 clients, alternately streaming, and wait until the streams have begun."""
    clients = ask_many(url, 16, tokens)
    wait_until_flowing(clients[::2])
    return clients


@pytest.mark.parametrize("flags", [STEP, NO_TIME], ids=["drained", "handed over"])
@pytest.mark.parametrize("fits", [True, False], ids=["beside", "after"])
def test_a_reload_costs_16_clients_nothing(tmp_path: Path, flags: str, fits: bool) -> None:
    tokens = MANY_TOKENS if flags is NO_TIME else TOKENS
    with serving(tmp_path, flags, fits=fits) as served:
        clients = ask_16(served.url, tokens)
        (old,) = served.workers("ready")
        done, text = served.reload()
        assert done, text
        assert served.workers("ready") != [old]
        wait_for(clients, 60)
        assert_undisturbed(clients, tokens)
        resumed = served.status()["gateway"]["failover"].get("resumed", 0)
        assert resumed == (16 if flags is NO_TIME else 0)


def test_requests_are_served_during_consecutive_reloads(tmp_path: Path) -> None:
    with serving(tmp_path, NO_TIME) as served:
        clients = ask_16(served.url)
        pids = served.workers("ready")
        for _ in range(3):
            late = ask(served.url, "!tokens=100")
            done, text = served.reload()
            assert done, text
            pids += served.workers("ready")
            wait_for([late], 30)
            assert late.texts == [scripted("!tokens=100", 100)]
        wait_for(clients, 60)
        assert_undisturbed(clients, TOKENS)
        assert len(set(pids)) == 4


@pytest.mark.parametrize(
    ("flags", "why", "ready_timeout_s"),
    [("--broken", "exited with status 78", 30), ("--load 60", "was not ready within 3 s", 3)],
)
def test_a_worker_that_does_not_get_ready_leaves_the_old_one_in_place(
    tmp_path: Path, flags: str, why: str, ready_timeout_s: float
) -> None:
    with serving(tmp_path, STEP, ready_timeout_s=ready_timeout_s) as served:
        clients = ask_16(served.url)
        old = served.workers("ready")
        served.set_worker(flags)
        done, text = served.reload()
        assert not done
        assert why in text
        wait_for(clients, 60)
        assert_undisturbed(clients, TOKENS)
        assert served.workers("ready") == old
        eventually(lambda: len(served.status()["workers"]) == 1, within_s=30, what="the new one is gone")

        served.set_worker(STEP)
        eventually(lambda: served.reload()[0], within_s=60, what="the next reload succeeds")
        assert served.workers("ready") != old


def test_reload_without_a_running_server_fails(tmp_path: Path) -> None:
    with pytest.raises(control.ControlError, match="no `roundhouse serve` is listening"):
        control.order(tmp_path / "control")


def test_a_reload_that_is_under_way_when_all_stops_is_answered(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.set_worker("--load 60")
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(tmp_path / "control"))
            line.sendall(control.encode(ReloadOrder()))
            eventually(lambda: served.workers("loading"), within_s=30, what="the new one loads")
            served.process.kill(signal.SIGTERM)
            line.settimeout(30)
            assert line.recv(100) == b"-the server is stopping"
        assert served.process.wait() == 0
        assert not (tmp_path / "control").exists()


def test_a_worker_that_is_told_to_stop_ends_its_requests_and_takes_no_others(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        worker = system.start_worker(*STEP.split())
        system.wait_ready()
        clients = ask_many(system.url, 4, TOKENS)
        wait_until_flowing(clients[::2])
        worker.kill(signal.SIGTERM)
        eventually(lambda: system.http.get("/ready").status_code == 503, within_s=10, what="not ready")
        refused = system.http.post("/v1/chat/completions", json=chat_body("hi"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_unavailable")
        assert "retry-after" in refused.headers
        assert worker.running
        wait_for(clients, 30)
        assert_undisturbed(clients, TOKENS)
        assert worker.wait() == 0
        assert "resumed" not in system.http.get("/v1/status").json()["gateway"]["failover"]


@pytest.mark.parametrize("again", [False, True], ids=["out of time", "told again"])
def test_requests_that_outlast_the_drain_timeout_resume_on_another_worker(
    tmp_path: Path, again: bool
) -> None:
    with running_system(tmp_path) as system:
        flags = STEP.split()
        worker = system.start_worker(*flags, "--drain-timeout", "3600" if again else "0.3")
        system.wait_ready()
        clients = ask_many(system.url, 4, MANY_TOKENS)
        wait_until_flowing(clients[::2])
        other = system.start_worker(*flags)
        eventually(lambda: system.gateway.log().count("is ready:") == 2, within_s=30, what="two are ready")
        worker.kill(signal.SIGTERM)
        if again:
            eventually(lambda: "draining:" in worker.log(), within_s=10, what="it drains")
            worker.kill(signal.SIGTERM)
        assert worker.wait() == 0
        wait_for(clients, 60)
        assert_undisturbed(clients, MANY_TOKENS)
        assert system.http.get("/v1/status").json()["gateway"]["failover"]["resumed"] == 4
        assert other.running


def test_a_worker_that_drains_does_not_outstay_its_gateway(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        worker = system.start_worker(*STEP.split(), "--drain-timeout", "3600")
        system.wait_ready()
        clients = ask_many(system.url, 2, 5000)
        wait_until_flowing(clients[:1])
        worker.kill(signal.SIGTERM)
        eventually(lambda: "draining:" in worker.log(), within_s=10, what="it drains")
        assert worker.running
        system.restart_gateway()
        assert worker.wait() == 0
        wait_for(clients, 30)
