"""Two workers of one model: a fault of one costs its clients a pause, and the other takes over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from protocol import sockets
from tests.faults.several import Scripted, Several, several
from tests.faults.streams import Client, wait_for, wait_until_flowing
from tests.faults.test_flights import ask_many, assert_undisturbed
from tests.system import Process, System, eventually, free_port, running_system

STREAMS, TOKENS = 8, 75
FLAGS = "--step-ms 20 --images --load 2"
"""So slow to start that whether streams wait for that is seen."""
KEYS = "gateway.key", "worker.key", "worker.key_secret"
"""The key files that a worker on another machine needs."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    flags = "--silent-after 1 --hung-timeout 3"
    folder = tmp_path_factory.mktemp("replicas")
    with several(folder, Scripted("m", FLAGS, replicas=2), gateway_flags=flags) as served:
        yield served


def both_ready(served: Several) -> list[int]:
    def two() -> list[int] | None:
        return found if len(found := served.workers("ready")) == 2 else None

    return eventually(two, within_s=60, what="two workers are ready") or []


def assigned(served: Several) -> list[int]:
    return [worker["assigned"] for worker in served.status()["workers"]]


def all_aboard(served: Several) -> list[int]:
    """Return the numbers of requests assigned to the workers, or an empty list until all are assigned."""
    return counts if sum(counts := assigned(served)) == STREAMS else []


def streams_on_both(served: Several) -> list[Client]:
    """Start clients, alternately streaming, distributed evenly over both workers."""
    both_ready(served)
    served.http.delete("/v1/cache").raise_for_status()  # otherwise they would follow their prefixes
    clients = ask_many(served.url, STREAMS, TOKENS)
    # Count as soon as all are assigned: when the last one flows, the first may have ended.
    counts = eventually(lambda: all_aboard(served), within_s=60, what="all are assigned")
    assert all(abs(count - STREAMS // 2) <= 1 for count in counts), counts
    wait_until_flowing(clients[::2])
    return clients


def failovers(served: Several) -> tuple[int, int]:
    """Return how many requests have lost their worker, and how many have gone on."""
    counts = served.status()["gateway"]["failover"]
    return counts.get("grounded", 0), counts.get("resumed", 0)


def lose(served: Several, number: signal.Signals) -> None:
    """Send a signal to one of the workers: its streams must go on with the other one, without waiting for a
    new one, and it is replaced."""
    victim, survivor = both_ready(served)
    clients, before = streams_on_both(served), failovers(served)
    os.kill(victim, number)

    def moved() -> bool:
        grounded, resumed = failovers(served)
        return grounded == resumed > before[1]

    eventually(moved, within_s=60, what="its streams go on")
    assert served.workers("ready") == [survivor], "no stream waited for the new worker"
    wait_for(clients, 60)
    assert_undisturbed(clients, TOKENS)
    replaced = both_ready(served)
    assert survivor in replaced
    assert victim not in replaced


def test_when_one_of_two_is_killed_its_streams_go_on_at_once_with_the_other(served: Several) -> None:
    lose(served, signal.SIGKILL)
    clients = ask_many(served.url, STREAMS, TOKENS)
    eventually(
        lambda: min(assigned(served)) > 0,
        within_s=60,
        what="the new worker gets some, although the other one has all prefixes",
    )
    wait_for(clients, 60)


def test_when_one_of_two_hangs_its_streams_go_on_with_the_other_and_it_is_replaced(served: Several) -> None:
    lose(served, signal.SIGSTOP)
    assert "is unresponsive: killed" in served.process.log()


def test_a_reload_takes_one_after_the_other_and_no_request_is_lost(served: Several) -> None:
    before, over, least = both_ready(served), threading.Event(), [2]

    def watch() -> None:
        while not over.wait(0.02):
            least.append(len(served.workers("ready")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        clients = streams_on_both(served)
        done, text = served.reload()
    finally:
        over.set()
        watcher.join()
    assert done, text
    assert text.count("has taken over from") == 2
    assert not set(both_ready(served)) & set(before)
    assert min(least) >= 2, "each starts before the worker that it replaces ends"
    wait_for(clients, 60)
    assert_undisturbed(clients, TOKENS)


# --- workers of other machines -----------------------------------------------------------------------


def joining(system: System, endpoint: str, keys: Path, *flags: str) -> Process:
    """Start a worker as on another machine, with copies of the keys."""
    return system.start_worker("--curve-keys", str(keys), *flags, endpoint=endpoint)


def worker_keys(folder: Path, keys: Path) -> Path:
    """Copy the key files without the gateway's secret."""
    copied = folder / "copied"
    copied.mkdir(mode=0o700)
    for name in KEYS:
        (copied / name).write_bytes((keys / name).read_bytes())
        (copied / name).chmod(0o600)
    return copied


def wait_until(system: System, workers: Sequence[Process]) -> None:
    """Wait until exactly these workers are connected and ready."""
    wanted = {worker.pid: "ready" for worker in workers}

    def found() -> bool:
        workers = system.http.get("/v1/status").json()["workers"]
        return {worker["pid"]: worker["state"] for worker in workers} == wanted

    eventually(found, within_s=60, what=f"workers are {wanted}")


@pytest.mark.timeout(180)
def test_a_worker_joins_over_tcp_with_keys_is_cut_off_when_it_hangs_and_comes_back(tmp_path: Path) -> None:
    keys, join = tmp_path / "keys", f"tcp://127.0.0.1:{free_port()}"
    sockets.write_keys(keys)
    flags = ["--join", join, "--curve-keys", str(keys), "--silent-after", "1", "--hung-timeout", "1"]
    with running_system(tmp_path, flags) as system:
        here = system.start_worker("--curve-keys", str(keys), "--step-ms", "20", "--images")
        there = joining(system, join, worker_keys(tmp_path, keys), "--step-ms", "20", "--images")
        sockets.write_keys(tmp_path / "others")
        stranger = joining(system, join, tmp_path / "others")
        keyless = system.start_worker(endpoint=join)
        wait_until(system, [here, there])
        clients = ask_many(system.url, STREAMS, TOKENS)
        wait_until_flowing(clients[::2])
        there.kill(signal.SIGSTOP)
        eventually(
            lambda: "is unresponsive: disconnected" in system.gateway.log(), within_s=30, what="it is cut off"
        )
        wait_until(system, [here])
        wait_for(clients, 60)
        assert_undisturbed(clients, TOKENS)
        there.kill(signal.SIGCONT)
        wait_until(system, [here, there])
        assert there.running
        clients = ask_many(system.url, STREAMS, TOKENS)
        wait_until_flowing(clients[::2])
        here.kill()
        wait_for(clients, 60)
        assert_undisturbed(clients, TOKENS)
        assert all(process.running for process in (stranger, keyless)), "they wait for another gateway"
        assert {worker["host"] for worker in system.http.get("/v1/status").json()["workers"]} == {
            os.uname().nodename
        }
