"""Workers die, hang and restart, and the gateway is unaffected."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.faults.serving import Served, serving
from tests.faults.streams import Client, ask, scripted, wait_for, wait_until_flowing
from tests.system import NO_TLS, System, chat_body, eventually, running_system, stable

STREAMS = 4
TEXT, TOKENS = "!tokens=75", 75


def open_streams(url: str, text: str = TEXT) -> list[Client]:
    streams = [ask(url, text) for _ in range(STREAMS)]
    wait_until_flowing(streams)
    return streams


def assert_undisturbed(streams: list[Client], text: str = TEXT, tokens: int = TOKENS) -> None:
    wait_for(streams, 60)
    assert [stream.texts for stream in streams] == [[scripted(text, tokens)]] * STREAMS


@contextlib.contextmanager
def watched_health(url: str) -> Iterator[None]:
    """Assert that /health answers 200 throughout the context; an error in the thread fails the test too."""
    statuses, over = list[int](), threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=url, timeout=5, verify=NO_TLS) as client:
            while not over.wait(0.02):
                statuses.append(client.get("/health").status_code)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        yield
    finally:
        over.set()
        poller.join()
    assert set(statuses) == {200}


def kill_under_streams(served: Served) -> None:
    """Kill the worker under streams, which notice only the pause."""
    streams = open_streams(served.url)
    with watched_health(served.url):
        [worker] = served.workers("ready")
        os.kill(worker, signal.SIGKILL)
        eventually(
            lambda: served.http.get("/ready").status_code != 200, within_s=10, what="the death is noticed"
        )
        between = served.http.post("/v1/chat/completions", json=chat_body("Hello?"))
        assert between.status_code == 503
        assert int(between.headers["retry-after"]) >= 1
        assert between.json()["error"]["code"] in ("worker_unavailable", "model_loading")
        served.wait_ready()
        assert_undisturbed(streams)
    assert {stream.completion_tokens for stream in streams} == {TOKENS + 1}


def test_the_gateway_and_its_streams_outlive_kills_and_nothing_leaks(tmp_path: Path) -> None:
    with serving(tmp_path, "--step-ms 20 --load 1") as served:
        process, [pid] = served.process, served.gateway_pids()
        gateway = psutil.Process(pid)
        kill_under_streams(served)  # the first round opens long-lived descriptors
        descriptors = stable(gateway.num_fds, within_s=30, what="descriptors of the gateway")
        children = stable(lambda: len(process.stats.children(recursive=True)), within_s=60, what="processes")
        kill_under_streams(served)
        assert served.gateway_pids() == [pid]
        stable(
            lambda: len(process.stats.children(recursive=True)),
            within_s=60,
            what=f"{children} processes of the supervisor",
            accept=lambda count: count == children,
        )
        eventually(lambda: gateway.num_fds() <= descriptors, within_s=10, what="no descriptor leaked")
        process.kill(signal.SIGTERM)
        assert process.wait() == 0
        assert "stopping: 0 requests in flight" in process.log()
        assert process.log().count(" resumes after ") >= 2


def test_a_worker_killed_with_frames_still_on_their_way_is_known_to_be_dead_at_once(tmp_path: Path) -> None:
    with running_system(tmp_path, ["--silent-after", "60"]) as system:
        for _ in range(2):
            worker = system.start_worker()  # at full speed, so its last frames are read after its death
            system.wait_ready()
            streams = open_streams(system.url, "hi !tokens=1500")
            worker.kill()
            worker.wait()
            successor = system.start_worker()
            assert_undisturbed(streams, "hi !tokens=1500", 1500)
            successor.stop()
        assert "connection lost" in system.gateway.log()


def test_a_worker_whose_model_hangs_ends_itself_and_dumps_its_stacks(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        worker = system.start_worker("--stall-timeout", "1")
        system.wait_ready()
        hangs = ask(system.url, "!hang=2")
        assert worker.wait() == 70
        assert "most recent call first" in worker.log()
        for _ in range(2):  # it is retried twice
            worker = system.start_worker("--stall-timeout", "1")
            assert worker.wait() == 70
        system.start_worker()  # survives, without the request
        wait_for([hangs], 30)
        assert hangs.error == "worker_crashed"


def test_an_error_of_the_gpu_hands_its_neighbours_over_and_costs_its_own_request(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        worker = system.start_worker("--step-ms", "20")
        system.wait_ready()
        streams = open_streams(system.url)
        fatal = ask(system.url, "!gpu=OutOfMemory")
        for _ in range(3):
            assert worker.wait() == 75
            assert "the GPU ran out of memory: [METAL] Command buffer execution failed" in worker.log()
            worker = system.start_worker("--step-ms", "20")
        assert_undisturbed(streams)
        wait_for([fatal], 60)
        assert fatal.error == "worker_crashed"
        assert worker.running


# --- one gateway and one worker ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("one")) as system:
        system.start_worker("--step-ms", "20")
        system.wait_ready()
        yield system


def rows(system: System) -> int:
    workers = system.http.get("/v1/status").json()["workers"]
    return sum(len(worker["rows"]) for worker in workers)


def wait_until_free(system: System) -> None:
    """Wait until no row is left. The long ones of these tests would take minutes."""
    eventually(lambda: rows(system) == 0, within_s=60, what="no row is left")


def test_a_failing_request_takes_no_neighbour_with_it(system: System) -> None:
    streams = open_streams(system.url)
    for words in ("!oom", "!bad", "!what=3"):
        assert system.http.post("/v1/chat/completions", json=chat_body(words)).status_code in (400, 500)
    assert_undisturbed(streams)


def test_a_gateway_that_returns_finds_its_worker_still_loaded_and_without_rows(system: System) -> None:
    [worker], streams = system.workers, open_streams(system.url, "!tokens=8000 !slow=100")
    system.restart_gateway()
    for stream in streams:
        stream.join(10)
        assert not stream.is_alive()
    system.wait_ready()
    wait_until_free(system)
    assert worker.running
    answer = system.http.post("/v1/chat/completions", json=chat_body("hi !tokens=3"))
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_a_worker_of_another_protocol_version_is_turned_away(system: System) -> None:
    script = (
        "import sys, protocol.messages as m; m.PROTOCOL_VERSION = 999;"
        "import worker.transport.service as s; s.PROTOCOL_VERSION = 999;"
        "import tests.scripted_worker.__main__ as f; sys.argv[1:1] = ['--endpoint'];"
        "raise SystemExit(f.main())"
    )
    worker = subprocess.run(
        [sys.executable, "-c", script, system.endpoint],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert worker.returncode == 78
    assert "999" in worker.stderr
    assert "rejected" in system.gateway.log()


def test_ten_failing_steps_in_a_row_end_the_worker_for_a_restart(system: System) -> None:
    [worker] = system.workers
    for _ in range(10):
        answer = system.http.post("/v1/chat/completions", json=chat_body("!fail=0"))
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_error"
        assert answer.headers["x-should-retry"] == "false"
    assert worker.wait() == 70
