"""`kill -9` of the gateway: clients that come meanwhile, and a request that it had."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.faults.retrying import RetryingClient
from tests.faults.several import serving
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


def steps_once_idle(system: System) -> int:
    """Return the number of steps of the worker when it runs nothing."""

    def steps() -> int:
        [worker] = system.http.get("/v1/status").json()["workers"]
        return 0 if worker["running"] else int(worker["steps"])

    return eventually(steps, within_s=60, what="the worker is idle")


def test_request_of_a_killed_gateway_goes_on_without_a_token_computed_twice(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        system.start_ready_worker("--step-ms", "20")
        steps: list[int] = []
        for is_killed in (False, True):
            client = RetryingClient(system.url, "chat", PROMPT, str(is_killed), stream=True)
            client.start()
            if is_killed:
                # Once it has had output for a while, the journal has its request.
                eventually(lambda c=client: c.read.count(b"data: ") >= DELTAS_BEFORE, within_s=60)
                system.restart_gateway()
            client.join()
            assert (client.wrong, client.text) == ("", scripted(PROMPT, TOKENS))
            steps.append(steps_once_idle(system) - sum(steps))
        assert steps[0] == steps[1]
        # The client that comes back gets the same bytes again.
        beginning = client.beginnings[0]
        assert bytes(client.read).startswith(beginning[: beginning.rindex(b"\n\n")])
        told = system.http.get("/v1/status").json()
        assert told["gateway"]["failover"] == {"restored": 1, "adopted": 1}
        assert told["durable"]["journal"]["problem"] == ""
