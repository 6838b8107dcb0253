"""`kill -9` of the gateway: clients that come meanwhile, and the requests that it had."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.faults.restoring import Answer, RestoringSystem, read
from tests.faults.serving import serving
from tests.faults.streams import Client, ask, scripted, wait_until_flowing
from tests.system import NO_TLS, chat_body, eventually

CLIENTS = 16
TOKENS = 400


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


# --- restored requests ----------------------------------------------------------------------------------


@contextlib.contextmanager
def restoring(folder: Path) -> Iterator[RestoringSystem]:
    system = RestoringSystem(folder)
    try:
        yield system
    finally:
        system.stop()


def all_ended(system: RestoringSystem, count: int) -> list[Answer]:
    """Return the `count` answers of the journal once they have ended."""

    def ended() -> list[Answer]:
        found = [answer for answer in read(system.journal).values() if answer.end]
        return found if len(found) == count else []

    return eventually(ended, within_s=60, what="all answers have ended")


def steps_once_idle(system: RestoringSystem) -> int:
    """Return the number of steps of the worker when it runs nothing."""

    def steps() -> int:
        [worker] = system.http.get("/v1/status").json()["workers"]
        return 0 if worker["running"] else int(worker["steps"])

    return eventually(steps, within_s=60, what="the worker is idle")


def test_requests_of_a_killed_gateway_go_on_and_no_token_is_computed_twice(tmp_path: Path) -> None:
    with restoring(tmp_path) as system:
        system.start_worker("--step-ms", "10", "--max-running", str(CLIENTS))
        system.wait_ready()
        clients = [ask(system.url, f"!tokens={TOKENS}") for _ in range(CLIENTS)]
        wait_until_flowing(clients)
        system.restart_gateway()
        answers = all_ended(system, CLIENTS)
        assert system.failovers() == {"restored": CLIENTS, "adopted": CLIENTS}
        assert [answer.text for answer in answers] == [scripted(f"!tokens={TOKENS}", TOKENS)] * CLIENTS
        for client in clients:
            client.join()


def test_a_real_model_computes_the_same_steps_with_and_without_a_gateway(tmp_path: Path) -> None:
    with restoring(tmp_path) as system:
        system.start_worker("--speculation", "off", module="worker")
        system.wait_ready()
        body = chat_body("Hello", stream=True, max_tokens=500, ignore_eos=True, temperature=0)
        texts: list[str] = []
        steps: list[int] = []
        for is_killed in (False, True):
            client = Client(system.url, body)
            client.start()
            wait_until_flowing([client])
            if is_killed:
                system.restart_gateway()
            texts += [all_ended(system, len(texts) + 1)[-1].text]
            steps += [steps_once_idle(system) - sum(steps)]
            client.join()
        assert texts[0] == texts[1]
        assert steps[0] == steps[1]
        assert system.failovers() == {"restored": 1, "adopted": 1}
