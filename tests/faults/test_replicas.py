"""Two workers of one model: a fault of one costs its clients a pause, and the other takes over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol import sockets
from tests.faults.several import Scripted, Several, several
from tests.faults.streams import Client, ask, scripted, wait_for, wait_until_flowing
from tests.faults.test_flights import ask_many, assert_undisturbed
from tests.system import Process, System, eventually, free_port, running_system

STREAMS, TOKENS = 16, 300
SLOW_START = "--step-ms 5 --images --load 6"
"""Slow enough that streams which wait for its start are recognizable."""
KEYS = "gateway.key", "worker.key", "worker.key_secret"
"""The key files that a worker on another machine needs."""


def ready(served: Several) -> list[int]:
    """Return the process ids of the ready workers."""
    return [worker["pid"] for worker in served.status()["workers"] if worker["state"] == "ready"]


def both_ready(served: Several) -> list[int]:
    def two() -> list[int] | None:
        return found if len(found := ready(served)) == 2 else None

    return eventually(two, within_s=60, what="two workers are ready") or []


def assigned(served: Several) -> dict[int, int]:
    return {worker["pid"]: worker["assigned"] for worker in served.status()["workers"]}


def told(served: Several) -> tuple[object, ...]:
    """Return the supervisor's and the gateway's counters of the model."""
    [model] = served.status()["models"]
    return model["replicas"], model["restarts"], model["losses"]


def all_aboard(served: Several) -> list[int]:
    """Return the numbers of requests assigned to the workers, or an empty list until all are assigned."""
    counts = list(assigned(served).values())
    return counts if sum(counts) == STREAMS else []


def streams_on_both(served: Several) -> list[Client]:
    """Start clients, alternately streaming, distributed evenly over both workers."""
    clients = ask_many(served.url, STREAMS, TOKENS)
    # Count as soon as all are assigned: when the last one flows, the first may have ended.
    counts = eventually(lambda: all_aboard(served), within_s=60, what="all are assigned")
    assert all(abs(count - STREAMS // 2) <= 1 for count in counts), counts
    wait_until_flowing(clients[::2])
    return clients


def test_when_one_of_two_is_killed_its_streams_go_on_at_once_with_the_other(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("m", SLOW_START, replicas=2)) as served:
        victim, survivor = both_ready(served)
        clients = streams_on_both(served)
        os.kill(victim, signal.SIGKILL)
        wait_for(clients, 60)
        assert ready(served) == [survivor], "no stream waited for the new worker"
        assert_undisturbed(clients, TOKENS)
        failover = served.status()["gateway"]["failover"]
        assert failover["resumed"] == failover["grounded"] > 0
        replaced = both_ready(served)
        assert survivor in replaced
        assert victim not in replaced
        counts = 2, 1, {"dead": 1}
        eventually(lambda: told(served) == counts, within_s=30, what="one restart and one loss are counted")
        clients = ask_many(served.url, STREAMS, TOKENS)
        eventually(
            lambda: min(assigned(served).values()) > 0,
            within_s=60,
            what="the new worker gets some, although the other one has all prefixes",
        )
        wait_for(clients, 60)


def test_when_one_of_two_hangs_its_streams_go_on_with_the_other_and_it_is_replaced(tmp_path: Path) -> None:
    flags = "--silent-after 1 --hung-timeout 1"
    with several(tmp_path, Scripted("m", SLOW_START, replicas=2), gateway_flags=flags) as served:
        victim, survivor = both_ready(served)
        clients = streams_on_both(served)
        os.kill(victim, signal.SIGSTOP)
        wait_for(clients, 60)
        assert ready(served) == [survivor]
        assert_undisturbed(clients, TOKENS)
        eventually(lambda: "is unresponsive: killed" in served.process.log(), within_s=30, what="the kill")
        assert victim not in both_ready(served)


def test_a_reload_takes_one_after_the_other_and_no_request_is_lost(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("m", "--step-ms 5 --images --load 0.5", replicas=2)) as served:
        before = both_ready(served)
        over = threading.Event()
        least = [2]

        def watch() -> None:
            while not over.is_set():
                least.append(len(ready(served)))

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


def test_both_get_the_spare_by_turns_and_no_two_have_one_incarnation(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("m", "--step-ms 5", replicas=2), spare=True) as served:
        first, second = both_ready(served)
        incarnations = {worker["incarnation"] for worker in served.status()["workers"]}
        for victim in (first, second):
            spare = eventually(served.there, within_s=60, what="a spare")
            os.kill(victim, signal.SIGKILL)
            eventually(lambda spare=spare: spare in ready(served), within_s=60, what="it serves")
            both_ready(served)
            incarnations |= {worker["incarnation"] for worker in served.status()["workers"]}
        assert len(incarnations) == 4


def test_replicas_are_loaded_and_unloaded_together_where_models_run_on_demand(tmp_path: Path) -> None:
    models = Scripted("kept", resident=True), Scripted("pair", replicas=2)
    with several(tmp_path, *models, gateway_flags="--unload-after 1") as served:
        served.wait_for(kept="loaded", pair="unloaded")
        client = ask(served.url, "!tokens=10", model="pair")
        wait_for([client], 60)
        assert client.texts == [scripted("!tokens=10", 10)]
        served.wait_for(pair="unloaded")
        eventually(lambda: served.pids("pair") == [], within_s=30, what="both processes are gone")


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


def states(system: System) -> dict[int, str]:
    return {worker["pid"]: worker["state"] for worker in system.http.get("/v1/status").json()["workers"]}


def wait_until(system: System, workers: Sequence[Process]) -> None:
    """Wait until exactly these workers are connected and ready."""
    wanted = {worker.pid: "ready" for worker in workers}
    eventually(lambda: states(system) == wanted, within_s=60, what=f"workers are {wanted}")


@pytest.mark.timeout(180)
def test_a_worker_joins_over_tcp_with_keys_is_cut_off_when_it_hangs_and_comes_back(tmp_path: Path) -> None:
    keys, join = tmp_path / "keys", f"tcp://127.0.0.1:{free_port()}"
    sockets.write_keys(keys)
    flags = ["--join", join, "--curve-keys", str(keys), "--silent-after", "1", "--hung-timeout", "1"]
    with running_system(tmp_path, flags) as system:
        here = system.start_worker("--curve-keys", str(keys), "--step-ms", "5", "--images")
        there = joining(system, join, worker_keys(tmp_path, keys), "--step-ms", "5", "--images")
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
