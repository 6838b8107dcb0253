"""`kill -9` of the gateway, with processes as `roundhouse serve` runs them."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.faults.serving import serving
from tests.system import NO_TLS, eventually

CLIENTS = 16


def ask_for_health(url: str) -> int:
    return httpx.get(f"{url}/health", timeout=60, verify=NO_TLS).status_code


def test_clients_that_come_while_there_is_no_gateway_wait_for_the_next_one(tmp_path: Path) -> None:
    with serving(tmp_path) as served, ThreadPoolExecutor(CLIENTS) as pool:
        for killed in range(1, 3):
            os.kill(served.gateway_pids()[-1], signal.SIGKILL)
            statuses = list(pool.map(ask_for_health, [served.url] * CLIENTS))
            assert statuses == [200] * CLIENTS
            assert len(served.gateway_pids()) == killed + 1
        assert len(eventually(lambda: served.workers("ready"), within_s=30, what="the worker is back")) == 1


def test_clients_are_refused_once_the_server_stops(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout 5") as served:
        served.process.kill(signal.SIGTERM)
        assert served.process.wait() == 0
        try:
            status = ask_for_health(served.url)
        except httpx.ConnectError:
            status = 0
        assert status == 0
