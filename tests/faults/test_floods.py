"""A peer that floods the gateway with useless messages costs it neither time nor memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.system import Process, System, eventually, running_system

STREAMS, TOKENS = 4, 50
LATER, LATER_TOKENS = "later !tokens=20", 20
"""A request after the peer was rejected, while the flood still uses two cores."""
STEP = ("--name", "good", "--step-ms", "20")
KINDS = "megabytes of deltas", "megabytes of garbage"
"""Floods of single small messages would be none where the gateway reads fewer than it allows a peer."""
FLOOD_S_MAX = 60.0
PAUSE_S_MAX, REFERENCE_PAUSES = 5.0, 3
"""A pause may exceed `PAUSE_S_MAX` by so many times the wait of a gateway beside it that has no flood."""
GROWTH_BYTES_MAX = 512 * 2**20


@contextlib.contextmanager
def flooding(system: System, model: str, kind: str, *options: str) -> Iterator[Process]:
    peer = Process("flood", ["tests.faults.floods", system.endpoint, model, kind, *options], system.folder)
    try:
        yield peer
    finally:
        peer.stop()


def times_turned_away(system: System) -> int:
    return system.gateway.log().count(" rejected: ")


def is_out_of_service(system: System) -> bool:
    """Return whether the peer was rejected, or, on a slow machine, detected as starving its requests."""
    return times_turned_away(system) > 0 or "is starving" in system.gateway.log()


def models(system: System) -> set[str]:
    """Return the models of the workers in the gateway's status."""
    return {worker["model"] for worker in system.http.get("/v1/status").json()["workers"]}


def prompt(number: int) -> str:
    return f"{'go ' * (1 + number)}!tokens={TOKENS}"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("floods")) as system:
        system.start_ready_worker(*STEP)
        yield system


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Run another gateway, whose waits show what the machine alone costs."""
    with running_system(tmp_path_factory.mktemp("reference")) as system:
        yield system


def health_wait_s(system: System) -> float:
    asked_at = time.monotonic()
    assert system.http.get("/health").status_code == 200
    return time.monotonic() - asked_at


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_streams_go_on_beside_a_flood(system: System, reference: System, kind: str) -> None:
    before, rejected = system.gateway.stats.memory_info().rss, times_turned_away(system)
    clients = [ask(system.url, prompt(number), model="good") for number in range(STREAMS)]
    wait_until_flowing(clients)
    with flooding(system, "flood", kind, "--at-once"):
        waits_s, idle_s, growth, deadline = [0.0], [0.0], 0, time.monotonic() + FLOOD_S_MAX
        while any(client.is_alive() for client in clients) or times_turned_away(system) == rejected:
            waits_s.append(health_wait_s(system))
            idle_s.append(health_wait_s(reference))
            growth = max(growth, system.gateway.stats.memory_info().rss - before)
            assert time.monotonic() < deadline
        wait_for(clients, 1)
        # A request during the flood is served too.
        later = ask(system.url, LATER, model="good")
        wait_for([later], 30)
    assert [client.texts for client in clients] == [[scripted(prompt(n), TOKENS)] for n in range(STREAMS)]
    assert later.texts == [scripted(LATER, LATER_TOKENS)]
    pauses_s = [*waits_s, *(client.pause_s for client in (*clients, later))]
    assert max(pauses_s) < PAUSE_S_MAX + REFERENCE_PAUSES * max(idle_s)
    assert growth < GROWTH_BYTES_MAX
    eventually(lambda: models(system) == {"good"}, within_s=30, what="the good one alone is left")


def test_requests_of_a_worker_that_floods_are_finished_by_another(tmp_path: Path) -> None:
    with running_system(tmp_path) as system, flooding(system, "good", "heartbeats"):
        system.wait_ready()
        client = ask(system.url, prompt(1), model="good")
        eventually(lambda: is_out_of_service(system), within_s=FLOOD_S_MAX, what="it is out of service")
        system.start_worker(*STEP)
        wait_for([client], 60)
        assert client.texts == [scripted(prompt(1), TOKENS)]
