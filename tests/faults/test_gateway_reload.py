"""`roundhouse reload --gateway`: clients wait for the next gateway, or for the end of what they read."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.gateway_ends import end_gateways
from tests.faults.several import Served, serving
from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.system import eventually

LONG = "!tokens=20 !slow=100"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("reloads")) as served:
        yield served


def test_ends_of_the_gateway_refuse_nobody_and_lose_nothing_that_is_kept(tmp_path: Path) -> None:
    given = argparse.Namespace(kills=1, reloads=1, clients=8, tokens=80, interval=0.5, seed=1)
    assert end_gateways(tmp_path, given) == []


def test_a_stream_is_finished_while_clients_that_come_wait(served: Served) -> None:
    before, early = len(served.gateway_pids()), ask(served.url, LONG)
    wait_until_flowing([early])
    worker = served.workers("ready")
    answers: list[tuple[bool, str]] = []
    reload = threading.Thread(target=lambda: answers.append(served.reload(gateway=True)))
    reload.start()
    late = ask(served.url, "!tokens=5")
    wait_for([early, late], 60)
    reload.join(60)
    assert (early.texts, late.texts) == ([scripted(LONG, 20)], [scripted("!tokens=5", 5)])
    assert answers == [(True, "gateway was stopped and started again")]
    assert len(served.gateway_pids()) == before + 1
    assert eventually(lambda: served.workers("ready"), within_s=30, what="it is back") == worker


def test_a_request_to_a_new_gateway_waits_for_a_worker_that_the_supervisor_knows(served: Served) -> None:
    [worker], [*_, gateway] = served.workers("ready"), served.gateway_pids()
    os.kill(worker, signal.SIGSTOP)  # so it cannot connect
    try:
        os.kill(gateway, signal.SIGKILL)
        eventually(lambda: served.gateway_pids()[-1] != gateway, within_s=30, what="another one starts")
        client = ask(served.url, "!tokens=5")
        eventually(lambda: served.status()["gateway"]["in_flight"] == 1, within_s=30, what="it has it")
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_for([client], 60)
    assert client.texts == [scripted("!tokens=5", 5)]


def test_a_stream_beyond_the_drain_timeout_gets_an_error_event(tmp_path: Path) -> None:
    with serving(tmp_path, gateway_flags="--drain-timeout=0.2") as served:
        client = ask(served.url, "!tokens=200 !slow=100")
        wait_until_flowing([client])
        assert served.reload(gateway=True)[0]
        wait_for([client], 60)
        assert client.error == "shutting_down"
