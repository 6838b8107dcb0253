"""Workers die, hang and restart, and the gateway is unaffected."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.faults.streams import Client, ask, scripted, wait_for, wait_until_flowing
from tests.system import (
    NO_TLS,
    Process,
    System,
    chat_body,
    eventually,
    free_port,
    running_system,
    stable,
)

STREAMS = 4
ROUNDS = 3
QUESTION = "Count from 1 to 200."
ANSWER: dict[str, object] = {"ignore_eos": True, "max_tokens": 200}


def open_streams(url: str, text: str, **fields: object) -> list[Client]:
    streams = [ask(url, text, **fields) for _ in range(STREAMS)]
    wait_until_flowing(streams)
    return streams


class Health(threading.Thread):
    """A thread that polls /health and records the worst response."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._over = threading.Event()
        self.bad: list[object] = []
        self.asked = 0

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=5, verify=NO_TLS) as client:
            while not self._over.wait(0.02):
                try:
                    status = client.get("/health").status_code
                except httpx.TransportError as error:
                    self.bad.append(error)
                else:
                    self.asked += 1
                    if status != 200:
                        self.bad.append(status)

    def stop(self) -> None:
        self._over.set()
        self.join()


@contextlib.contextmanager
def watched_health(url: str) -> Iterator[None]:
    """Assert that /health answers 200 throughout the context."""
    health = Health(url)
    health.start()
    try:
        yield
    finally:
        health.stop()
    assert health.bad == []
    assert health.asked > 0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Process, str]]:
    """Run `roundhouse serve` with the embedded model and, by its variable, no spare, so that requests are
    refused after a kill."""
    with serving(tmp_path, environ={"ROUNDHOUSE_SPARE": "0"}) as found:
        yield found


@contextlib.contextmanager
def serving(
    tmp_path: Path, *more: str, environ: dict[str, str] | None = None
) -> Iterator[tuple[Process, str]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--port", str(port), "--endpoint", f"ipc://{tmp_path}/line"]
    flags += ["--deaths-max", "100", "--restart-delay-max", "0.2", *more]
    serve = Process("serve", ["deploy", "serve", *flags], tmp_path, environ)
    try:
        eventually(lambda: _status(url, "/ready") == 200, within_s=90, what="ready")
        yield serve, url
    finally:
        serve.stop()


def _status(url: str, path: str) -> int:
    try:
        return httpx.get(url + path, timeout=5, verify=NO_TLS).status_code
    except httpx.TransportError:
        return 0


def _post(url: str, body: dict[str, object], timeout_s: float) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout_s, verify=NO_TLS)


def _child(serve: Process, module: str) -> psutil.Process:
    for child in serve.stats.children():
        if module in child.cmdline():
            return child
    raise AssertionError(f"no child process runs {module}")


def _live_worker(serve: Process) -> psutil.Process:
    def look() -> psutil.Process | None:
        try:
            return _child(serve, "worker")
        except (AssertionError, psutil.NoSuchProcess):
            return None

    return eventually(look, within_s=30, what="a worker process")


def family(serve: Process) -> int:
    """Return the number of processes of the supervisor and its descendants."""
    return len(serve.stats.children(recursive=True))


def kill_under_streams(serve: Process, url: str, undisturbed: list[str]) -> None:
    """Kill the worker under streams, which notice only the pause."""
    streams = open_streams(url, QUESTION, **ANSWER)
    with watched_health(url):
        _live_worker(serve).kill()
        _refused_then_served(url)
        wait_for(streams, 60)
    assert [stream.texts for stream in streams] == [undisturbed] * STREAMS
    assert {stream.completion_tokens for stream in streams} == {ANSWER["max_tokens"]}


def _refused_then_served(url: str) -> None:
    eventually(lambda: _status(url, "/ready") != 200, within_s=10, what="the death is noticed")
    between = _post(url, chat_body("Hello?"), timeout_s=10)
    assert between.status_code == 503
    assert int(between.headers["retry-after"]) >= 1
    assert between.json()["error"]["code"] in ("worker_unavailable", "model_loading")
    eventually(lambda: _status(url, "/ready") == 200, within_s=60, what="ready again")
    after = _post(url, chat_body("Hello?", max_tokens=4), timeout_s=30)
    assert after.status_code == 200


@pytest.mark.timeout(600)
def test_the_gateway_and_its_streams_outlive_three_kills_and_nothing_leaks(
    served: tuple[Process, str],
) -> None:
    serve, url = served
    gateway = _child(serve, "broker")
    alone = ask(url, QUESTION, **ANSWER)
    wait_for([alone], 60)
    kill_under_streams(serve, url, alone.texts)  # the first round opens long-lived descriptors
    descriptors = stable(gateway.num_fds, within_s=30, what="descriptors of the gateway")
    processes = stable(lambda: family(serve), within_s=60, what="processes of the supervisor")
    for _ in range(ROUNDS - 1):
        kill_under_streams(serve, url, alone.texts)
    assert _child(serve, "broker").pid == gateway.pid
    stable(
        lambda: family(serve),
        within_s=60,
        what=f"{processes} processes of the supervisor",
        accept=lambda count: count == processes,
    )
    eventually(lambda: gateway.num_fds() <= descriptors, within_s=10, what="no descriptor leaked")
    serve.kill(signal.SIGTERM)
    assert serve.wait() == 0
    assert "stopping: 0 requests in flight" in serve.log()
    assert serve.log().count(" resumes after ") >= ROUNDS


@pytest.mark.timeout(600)
def test_streams_of_the_embedded_model_go_on_in_what_was_the_spare(tmp_path: Path) -> None:
    with serving(tmp_path) as (serve, url):
        alone = ask(url, QUESTION, **ANSWER)
        wait_for([alone], 60)
        eventually(lambda: "spare is ready" in serve.log(), within_s=90, what="the spare")
        streams = open_streams(url, QUESTION, **ANSWER)
        [worker] = httpx.get(f"{url}/v1/status", verify=NO_TLS).json()["workers"]
        psutil.Process(worker["pid"]).kill()
        wait_for(streams, 60)
        assert [stream.texts for stream in streams] == [alone.texts] * STREAMS
        [successor] = httpx.get(f"{url}/v1/status", verify=NO_TLS).json()["workers"]
        assert f"worker runs as pid {successor['pid']}, which was the spare" in serve.log()
        assert successor["start_s"]["imports"] < worker["start_s"]["imports"]


def test_a_worker_killed_with_frames_still_on_their_way_is_known_to_be_dead_at_once(tmp_path: Path) -> None:
    with running_system(tmp_path, ["--silent-after", "60"]) as system:
        for _ in range(3):
            worker = system.start_worker()  # at full speed, so its last frames are read after its death
            system.wait_ready()
            streams = open_streams(system.url, "hi !tokens=1500")
            worker.kill()
            worker.wait()
            successor = system.start_worker()
            wait_for(streams, 60)
            assert [stream.texts for stream in streams] == [[scripted("hi !tokens=1500", 1500)]] * STREAMS
            successor.stop()
        assert "connection lost" in system.gateway.log()


def test_a_worker_that_stops_beating_is_silent_and_goes_on_when_it_wakes(tmp_path: Path) -> None:
    with running_system(tmp_path, ["--silent-after", "1"]) as system:
        worker = system.start_worker("--step-ms", "5")
        system.wait_ready()
        streams = open_streams(system.url, "!tokens=300")
        worker.kill(signal.SIGSTOP)
        eventually(lambda: "is silent" in system.gateway.log(), within_s=10, what="the worker is silent")
        refused = system.http.post("/v1/chat/completions", json=chat_body("hi"))
        assert refused.status_code == 503
        worker.kill(signal.SIGCONT)
        system.wait_ready()
        answer = system.http.post("/v1/chat/completions", json=chat_body("hi !tokens=3"))
        assert answer.status_code == 200
        wait_for(streams, 30)
        assert [stream.texts for stream in streams] == [[scripted("!tokens=300", 300)]] * STREAMS


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


def test_a_gateway_that_returns_finds_its_worker_still_loaded(fake_system: System) -> None:
    worker = fake_system.workers[0]
    fake_system.restart_gateway()
    fake_system.wait_ready()
    assert worker.running
    answer = fake_system.http.post("/v1/chat/completions", json=chat_body("hi !tokens=3"))
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_rows_of_a_gateway_that_died_are_dropped(fake_system: System) -> None:
    streams = open_streams(fake_system.url, "!tokens=8000 !slow=100")
    fake_system.restart_gateway()
    for stream in streams:
        stream.join(10)
        assert not stream.is_alive()
    fake_system.wait_ready()
    # If the eight rows still slowed every step, this would take twenty seconds.
    began = time.monotonic()
    answer = fake_system.http.post("/v1/chat/completions", json=chat_body("!tokens=200"))
    assert answer.status_code == 200
    assert time.monotonic() - began < 10


def test_ten_failing_steps_in_a_row_end_the_worker_for_a_restart(fake_system: System) -> None:
    for _ in range(10):
        answer = fake_system.http.post("/v1/chat/completions", json=chat_body("!fail=0"))
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_error"
        assert answer.headers["x-should-retry"] == "false"
    assert fake_system.workers[0].wait() == 70


def test_an_error_of_the_gpu_hands_its_neighbours_over_and_costs_its_own_request(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        worker = system.start_worker()
        system.wait_ready()
        streams = open_streams(system.url, "!tokens=300 !slow=20")
        fatal = ask(system.url, "!gpu=OutOfMemory")
        for _ in range(3):
            assert worker.wait() == 75
            assert "the GPU ran out of memory: [METAL] Command buffer execution failed" in worker.log()
            worker = system.start_worker()
        wait_for([fatal, *streams], 60)
        assert fatal.error == "worker_crashed"
        assert [stream.texts for stream in streams] == [[scripted("!tokens=300 !slow=20", 300)]] * STREAMS
        assert worker.running


def test_a_failing_request_takes_no_neighbour_with_it(fake_system: System) -> None:
    streams = open_streams(fake_system.url, "!tokens=60 !slow=20")
    for words in ("!oom", "!bad", "!what=3"):
        assert fake_system.http.post("/v1/chat/completions", json=chat_body(words)).status_code in (400, 500)
    for stream in streams:
        stream.join(20)
        assert stream.texts == [scripted("!tokens=60 !slow=20", 60)]


def test_a_client_that_leaves_frees_its_row(fake_system: System) -> None:
    with httpx.stream(
        "POST",
        f"{fake_system.url}/v1/chat/completions",
        json=chat_body("!tokens=8000 !slow=100", stream=True),
        verify=NO_TLS,
    ) as answer:
        next(answer.iter_lines())
    whole = threading.Thread(target=_ask_and_leave, args=(fake_system.url,))
    whole.start()
    whole.join(10)
    began = time.monotonic()
    answer = fake_system.http.post("/v1/chat/completions", json=chat_body("!tokens=200"))
    assert answer.status_code == 200
    assert time.monotonic() - began < 10  # 200 steps beside a row that slows each by 100 ms would take 20 s
    assert "client left" in fake_system.gateway.log()


def _ask_and_leave(url: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        _post(url, chat_body("!tokens=8000 !slow=100"), timeout_s=0.5)


def test_a_worker_of_another_protocol_version_is_turned_away(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
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
