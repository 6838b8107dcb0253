"""`kill -9` of the gateway: clients that come meanwhile, and the requests that it had."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.faults.serving import serving
from tests.faults.streams import scripted
from tests.system import NO_TLS, System, chat_body, eventually, running_system, sse_documents

CLIENTS = 6
TOKENS = 150
DELTAS_BEFORE = 30


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


class Retrying(threading.Thread):
    """A client that asks again with the same idempotency key until it has a whole answer, as the SDKs do."""

    def __init__(self, url: str, key: str, body: dict[str, object]) -> None:
        super().__init__()
        self._url, self._key, self._body = url, key, body
        self.read = bytearray()

    def run(self) -> None:
        deadline = time.monotonic() + 90
        while not self.read.endswith(b"data: [DONE]\n\n") and time.monotonic() < deadline:
            self.read.clear()
            with contextlib.suppress(httpx.HTTPError):
                self._ask()

    def _ask(self) -> None:
        with httpx.stream(
            "POST",
            f"{self._url}/v1/chat/completions",
            json=self._body,
            headers={"idempotency-key": self._key},
            timeout=60,
            verify=NO_TLS,
        ) as answer:
            for piece in answer.iter_raw():
                self.read += piece

    def has(self, deltas: int) -> bool:
        return self.read.count(b"data: ") >= deltas

    @property
    def text(self) -> str:
        *events, done = sse_documents(iter(self.read.decode().split("\n")))
        assert done == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


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


def begin(system: System, count: int, body: dict[str, object], prefix: str) -> list[Retrying]:
    """Start clients, and wait until each has had output for a while, so that the journal has its request."""
    clients = [Retrying(system.url, f"{prefix}-{number}", body) for number in range(count)]
    for client in clients:
        client.start()
    eventually(lambda: all(client.has(DELTAS_BEFORE) for client in clients), within_s=60, what="they flow")
    return clients


def test_requests_of_a_killed_gateway_go_on_where_they_were(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        system.start_worker("--step-ms", "20", "--max-running", str(CLIENTS))
        system.wait_ready()
        clients = begin(system, CLIENTS, chat_body(f"!tokens={TOKENS}", stream=True), "key")
        system.restart_gateway()
        for client in clients:
            client.join()
        assert [client.text for client in clients] == [scripted(f"!tokens={TOKENS}", TOKENS)] * CLIENTS
        # All of them were adopted: no row began anew.
        assert failovers(system) == {"restored": CLIENTS, "adopted": CLIENTS}


@pytest.mark.timeout(300)
def test_a_real_model_computes_each_token_once_with_and_without_a_gateway(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        system.start_worker("--speculation", "off", module="worker")
        system.wait_ready()
        body = chat_body("Hello", stream=True, max_tokens=TOKENS, ignore_eos=True, temperature=0)
        texts: list[str] = []
        steps: list[int] = []
        for is_killed in (False, True):
            client = Retrying(system.url, f"killed-{is_killed}", body)
            client.start()
            if is_killed:
                has_begun = partial(has_made, system, sum(steps) + DELTAS_BEFORE)
                eventually(has_begun, within_s=60, what="the journal has the request")
                system.restart_gateway()
            client.join()
            texts.append(client.text)
            steps.append(steps_once_idle(system) - sum(steps))
        assert texts[0] == texts[1]
        assert steps[0] == steps[1]
