"""Workers die, hang and restart, and the gateway is unaffected."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.faults.several import Served, serving
from tests.faults.streams import Client, ask, scripted, wait_for, wait_until_flowing
from tests.system import NO_TLS, chat_body, eventually, running_system, stable

STREAMS = 4
SECRET = "Mellifluous"
TEXT, TOKENS = f"{SECRET} !tokens=75", 75


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


def phases(served: Served) -> list[str]:
    return [row["phase"] for worker in served.status()["workers"] for row in worker["rows"]]


def kill_under_streams(served: Served) -> None:
    """Kill the worker under streams, which notice only the pause. Supervisor and gateway log a line each, of
    requests without their text."""
    streams = open_streams(served.url)
    with watched_health(served.url):
        [worker] = served.workers("ready")
        # The supervisor logs the last reported phases.
        eventually(lambda: phases(served) == ["decode"] * STREAMS, within_s=10, what="a beat with all")
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
    for line in (
        rf"worker \(pid {worker}\) was killed by SIGKILL after \d+\.\d s, at step \d+ with {STREAMS} requests"
        r" in flight: chatcmpl-\w+ \(decode, \d+\), .*; restarting (in|at once)",
        rf"worker for fake \(pid {worker}\) connection lost after step \d+, {STREAMS} requests in flight:"
        r" chatcmpl-\w+ \(\d+ tokens\), ",
    ):
        found = partial(re.search, line)
        eventually(lambda f=found: f(served.process.log()), within_s=10, what=f"a line like {line!r}")
    assert SECRET not in served.process.log()


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
        worker = system.start_worker()  # at full speed, so its last frames are read after its death
        system.wait_ready()
        streams = open_streams(system.url, "hi !tokens=1500")
        worker.kill()
        worker.wait()
        system.start_worker()
        assert_undisturbed(streams, "hi !tokens=1500", 1500)
        assert "connection lost" in system.gateway.log()


@pytest.mark.parametrize(
    ("text", "status", "logged"),
    [
        ("!hang=2", 70, "most recent call first"),
        ("!gpu=OutOfMemory", 75, "the GPU ran out of memory: [METAL] Command buffer execution failed"),
    ],
)
def test_a_hang_or_an_error_of_the_gpu_hands_neighbours_over_and_costs_its_own_request(
    tmp_path: Path, text: str, status: int, logged: str
) -> None:
    flags = "--step-ms", "20", "--stall-timeout", "1"
    with running_system(tmp_path) as system:
        worker = system.start_ready_worker(*flags)
        streams = open_streams(system.url)
        fatal = ask(system.url, text)
        for _ in range(3):  # it is retried twice
            assert worker.wait() == status
            assert logged in worker.log()
            worker = system.start_worker(*flags)
        assert_undisturbed(streams)
        wait_for([fatal], 60)
        assert fatal.error == "worker_crashed"
        assert worker.running


def test_a_failing_request_takes_no_neighbour_with_it(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        system.start_ready_worker("--step-ms", "20")
        streams = open_streams(system.url)
        for words in ("!oom", "!bad", "!what=3"):
            assert system.http.post("/v1/chat/completions", json=chat_body(words)).status_code in (400, 500)
        assert_undisturbed(streams)
