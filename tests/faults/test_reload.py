"""`roundhouse reload` and SIGTERM under streams: no request fails, and every text is undisturbed."""

from __future__ import annotations

import signal
import socket
from functools import partial
from pathlib import Path

from deploy.supervisor import control
from deploy.supervisor.reloading import ReloadOrder
from tests.faults.several import Served, serving
from tests.faults.streams import Client, ask, scripted, wait_for, wait_until_flowing
from tests.faults.test_flights import ask_many, assert_undisturbed
from tests.system import chat_body, eventually, running_system

STEP = "--step-ms 40"
CLIENTS = 4
SHORT, TOKENS = 50, 300
"""Short answers end while their worker drains; others outlast the start of another, on which they go on."""


def ask_all(url: str, count: int = CLIENTS, tokens: int = TOKENS) -> list[Client]:
    """Start clients, alternately streaming, and wait until the streams have begun."""
    clients = ask_many(url, count, tokens)
    wait_until_flowing(clients[::2])
    return clients


def resumed_by(served: Served) -> int:
    return int(served.status()["gateway"]["failover"].get("resumed", 0))


def is_gone(served: Served, old: list[int]) -> bool:
    return not {*old} & {*served.workers("ready")}


def test_consecutive_reloads_cost_clients_nothing_drained_or_handed_over(tmp_path: Path) -> None:
    with serving(tmp_path, STEP) as served:
        served.set_worker(f"{STEP} --drain-timeout 0")
        for tokens, resumed in ((SHORT, 0), (TOKENS, CLIENTS)):
            before = resumed_by(served)
            clients, old = ask_all(served.url, tokens=tokens), served.workers("ready")
            late = ask(served.url, "!tokens=15")
            wait_until_flowing([late])
            done, text = served.reload()
            assert done, text
            eventually(partial(is_gone, served, old), within_s=10, what="the old one is gone")
            wait_for([late, *clients], 60)
            assert late.texts == [scripted("!tokens=15", 15)]
            assert_undisturbed(clients, tokens)
            assert resumed_by(served) - before in (resumed, resumed + bool(resumed))  # the late one may be


def test_broken_worker_leaves_the_old_one_and_a_stop_answers_a_reload_under_way(tmp_path: Path) -> None:
    with serving(tmp_path, STEP) as served:
        clients, old = ask_all(served.url, tokens=SHORT), served.workers("ready")
        served.set_worker("--broken")
        done, text = served.reload()
        assert not done
        assert "exited with status 78" in text
        wait_for(clients, 60)
        assert_undisturbed(clients, SHORT)
        assert served.workers("ready") == old
        eventually(lambda: len(served.status()["workers"]) == 1, within_s=30, what="the new one is gone")
        served.set_worker(STEP)
        eventually(lambda: served.reload()[0], within_s=60, what="the next reload succeeds")
        assert served.workers("ready") != old

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


def test_a_reload_tells_of_other_content_and_of_a_name_that_nobody_serves_any_more(tmp_path: Path) -> None:
    with serving(tmp_path, f"{STEP} --model v1 --drain-timeout 0") as served:
        clients = ask_all(served.url, 2, SHORT)
        served.set_worker(f"{STEP} --model v2")
        done, text = served.reload()
        assert done
        assert "; its files or KV settings have changed, so it continued no request" in text
        wait_for(clients, 60)
        assert_undisturbed(clients, SHORT)
        served.set_worker(f"{STEP} --model v2 --name other")
        done, text = served.reload()
        assert (done, text.partition(",")[2]) == (False, " but fake is not served: it serves other")


# --- SIGTERM -------------------------------------------------------------------------------------------


def test_a_worker_that_is_told_to_stop_ends_its_requests_and_takes_no_others(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        worker = system.start_ready_worker(*STEP.split())
        clients = ask_all(system.url, 4, SHORT)
        worker.kill(signal.SIGTERM)
        eventually(lambda: system.http.get("/ready").status_code == 503, within_s=10, what="not ready")
        refused = system.http.post("/v1/chat/completions", json=chat_body("hi"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_unavailable")
        assert "retry-after" in refused.headers
        assert worker.running
        wait_for(clients, 30)
        assert_undisturbed(clients, SHORT)
        assert worker.wait() == 0
        assert "resumed" not in system.http.get("/v1/status").json()["gateway"]["failover"]


def test_requests_beyond_the_drain_timeout_or_a_second_signal_resume_elsewhere(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        worker = system.start_ready_worker(*STEP.split(), "--drain-timeout", "0.3")
        for again in (False, True):
            clients, ready = ask_all(system.url, 4, TOKENS), system.gateway.log().count("is ready:")
            other = system.start_worker(*STEP.split(), "--drain-timeout", "3600")
            eventually(
                lambda ready=ready: system.gateway.log().count("is ready:") > ready,
                within_s=30,
                what="two are ready",
            )
            worker.kill(signal.SIGTERM)
            if again:
                eventually(lambda w=worker: "draining:" in w.log(), within_s=10, what="it drains")
                worker.kill(signal.SIGTERM)
            assert worker.wait() == 0
            wait_for(clients, 60)
            assert_undisturbed(clients, TOKENS)
            failover = system.http.get("/v1/status").json()["gateway"]["failover"]
            assert failover["resumed"] == (8 if again else 4)
            worker = other
        assert worker.running
        # One that drains does not outstay its gateway.
        clients = ask_all(system.url, 2, 1000)
        worker.kill(signal.SIGTERM)
        eventually(lambda: "draining:" in worker.log(), within_s=10, what="it drains")
        assert worker.running
        system.restart_gateway()
        assert worker.wait() == 0
        wait_for(clients, 30)
