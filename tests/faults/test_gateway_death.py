"""`kill -9` of the gateway: clients that come meanwhile, and the requests that it had."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.faults.retrying import RetryingClient
from tests.faults.serving import serving
from tests.faults.streams import scripted
from tests.system import NO_TLS, System, eventually, running_system

CLIENTS = 6
TOKENS = 150
DELTAS_BEFORE = 30
PROMPT = f"!tokens={TOKENS}"


def ask_for_health(url: str) -> int:
    return httpx.get(f"{url}/health", timeout=60, verify=NO_TLS).status_code


def test_clients_that_come_while_there_is_no_gateway_wait_for_the_next_one(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout 5") as served, ThreadPoolExecutor(CLIENTS) as pool:
        os.kill(served.gateway_pids()[-1], signal.SIGKILL)
        statuses = list(pool.map(ask_for_health, [served.url] * CLIENTS))
        assert statuses == [200] * CLIENTS
        assert len(served.gateway_pids()) == 2
        assert len(eventually(lambda: served.workers("ready"), within_s=30, what="the worker is back")) == 1
        # Once the server stops, there is no next one.
        served.process.kill(signal.SIGTERM)
        assert served.process.wait() == 0
        with pytest.raises(httpx.ConnectError):
            ask_for_health(served.url)


# --- requests that go on --------------------------------------------------------------------------------


def has_deltas(client: RetryingClient) -> bool:
    return client.read.count(b"data: ") >= DELTAS_BEFORE


def failovers(system: System) -> dict[str, int]:
    """Return the gateway's counts of failover events."""
    counts: dict[str, int] = system.http.get("/v1/status").json()["gateway"]["failover"]
    return counts


def steps_once_idle(system: System) -> int:
    """Return the number of steps of the worker when it runs nothing."""

    def steps() -> int:
        [worker] = system.http.get("/v1/status").json()["workers"]
        return 0 if worker["running"] else int(worker["steps"])

    return eventually(steps, within_s=60, what="the worker is idle")


def has_made(system: System, steps: int) -> bool:
    """Return whether the worker reports at least so many steps."""
    return any(worker["steps"] >= steps for worker in system.http.get("/v1/status").json()["workers"])


def test_requests_of_a_killed_gateway_go_on_where_they_were(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        system.start_worker("--step-ms", "20", "--max-running", str(CLIENTS))
        system.wait_ready()
        clients = [RetryingClient(system.url, "chat", PROMPT, str(n), stream=True) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        # Once each has had output for a while, the journal has its request.
        eventually(lambda: all(map(has_deltas, clients)), within_s=60, what="they flow")
        system.restart_gateway()
        for client in clients:
            client.join()
        assert [client.text for client in clients] == [scripted(PROMPT, TOKENS)] * CLIENTS
        # All of them were adopted: no row began anew.
        assert failovers(system) == {"restored": CLIENTS, "adopted": CLIENTS}


@pytest.mark.timeout(300)
def test_a_real_model_computes_each_token_once_with_and_without_a_gateway(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        system.start_worker("--speculation", "off", module="worker")
        system.wait_ready()
        [model] = system.http.get("/v1/models").json()["data"]
        fields = {"model": model["id"], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        texts: list[str | None] = []
        steps: list[int] = []
        for is_killed in (False, True):
            client = RetryingClient(system.url, "chat", "Hello", str(is_killed), stream=True, **fields)
            client.start()
            if is_killed:
                has_begun = partial(has_made, system, sum(steps) + DELTAS_BEFORE)
                eventually(has_begun, within_s=60, what="the journal has the request")
                system.restart_gateway()
            client.join()
            assert not client.wrong
            texts.append(client.text)
            steps.append(steps_once_idle(system) - sum(steps))
        assert texts[0]
        assert texts[0] == texts[1]
        assert steps[0] == steps[1]
