"""The prefix cache in the public API: a real gateway, and a worker simulated by the test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import httpx
import pytest
import zmq

from protocol import sockets, wire
from protocol.messages import (
    PROTOCOL_VERSION,
    CacheCleared,
    ClearCache,
    Generate,
    Heartbeat,
    Hello,
    Message,
    PrefixHit,
    Ready,
    Welcome,
)
from protocol.types import PrefixReuse, PrefixStatus, RequestStatus, TopPrefix
from tests.factories import accepted, events, finished
from tests.system import System, chat_body, eventually, running_system, sse_documents

WAIT_S = 30.0
PROMPT_TOKENS, CACHED_TOKENS = 1540, 1500

M = TypeVar("M", bound=Message)


class Worker:
    """A simulated worker that sends the messages that the test chooses."""

    def __init__(self, endpoint: str, name: str, model: str) -> None:
        self.name = name
        self.model = model
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.connect_dealer(self._context, endpoint, name, None)
        # Only an established connection accepts messages.
        self._socket.sndtimeo = int(1000 * WAIT_S)

    def close(self) -> None:
        monitor = self._socket.get_monitor_socket()
        self._socket.disable_monitor()
        monitor.close(0)
        self._socket.close(0)
        self._context.term()

    def say(self, message: Message) -> None:
        self._socket.send_multipart(wire.encode(message))

    def next(self, kind: type[M]) -> M:
        """Return the next message of a type; skip others."""
        while True:
            assert self._socket.poll(int(1000 * WAIT_S)), f"no {kind.__name__} has arrived"
            message, _ = wire.decode_to_worker(self._socket.recv_multipart())
            if isinstance(message, kind):
                return message

    def serve(self) -> None:
        self.say(Hello(incarnation=self.name, version=PROTOCOL_VERSION, model=self.model, pid=7))
        self.next(Welcome)
        self.say(Ready(incarnation=self.name, model=self.model, context_length=8192, running_max=4))
        self.beat()

    def beat(self, rows: list[RequestStatus] | None = None, prefix: PrefixStatus | None = None) -> None:
        rows = rows or []
        self.say(
            Heartbeat(incarnation=self.name, running=len(rows), waiting=0, steps=1, rows=rows, prefix=prefix)
        )

    def accept(self) -> Generate:
        request = self.next(Generate)
        self.say(accepted(self.name, request.id, prompt_tokens=PROMPT_TOKENS))
        return request

    def reuse(self, id: str, reuse: PrefixReuse) -> None:
        self.say(PrefixHit(incarnation=self.name, id=id, reuse=reuse))

    def answer(self, id: str, cached: int) -> None:
        self.say(events(self.name, id, "assigned"))
        self.say(finished(self.name, id, 1, cached, prompt=PROMPT_TOKENS))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    # The simulated worker sends heartbeats only when the test does.
    with running_system(tmp_path_factory.mktemp("cache"), ["--silent-after", "600"]) as system:
        yield system


@pytest.fixture
def worker(system: System, request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = Worker(system.endpoint, request.node.name, "org/model")
    worker.serve()
    system.wait_ready()
    yield worker
    worker.close()
    eventually(lambda: not system.http.get("/v1/status").json()["workers"], within_s=WAIT_S)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Yield threads for clients that wait for answers while the test acts as the worker."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def ask(system: System, pool: ThreadPoolExecutor, **fields: object) -> Future[httpx.Response]:
    return pool.submit(system.http.post, "/v1/chat/completions", json=chat_body("hello", **fields))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_says_what_was_reused_in_its_headers_and_its_usage(
    stream: bool, system: System, worker: Worker, pool: ThreadPoolExecutor
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    asked = ask(system, pool, cache_salt="tenant", cache_pin=True, **options)
    request = worker.accept()
    assert (request.cache_salt, request.cache_pin) == ("tenant", True)
    worker.reuse(request.id, PrefixReuse(tokens=CACHED_TOKENS, tier="disk", miss="diverged"))
    worker.answer(request.id, CACHED_TOKENS)
    answer = asked.result(WAIT_S)
    assert answer.headers["x-roundhouse-cache"] == "hit=1500/1540; tier=disk; miss=diverged"
    last = list(sse_documents(answer.iter_lines()))[-2] if stream else answer.text
    assert json.loads(last)["usage"]["prompt_tokens_details"] == {"cached_tokens": CACHED_TOKENS}


def test_a_stream_in_the_queue_gets_its_headers_before_it_is_known_what_is_reused(
    system: System, worker: Worker, pool: ThreadPoolExecutor
) -> None:
    def begin() -> httpx.Response:
        request = system.http.build_request(
            "POST", "/v1/chat/completions", json=chat_body("hello", stream=True)
        )
        return system.http.send(request, stream=True)

    asked = pool.submit(begin)
    request = worker.accept()
    answer = asked.result(WAIT_S)
    assert answer.status_code == 200
    assert "x-roundhouse-cache" not in answer.headers
    worker.reuse(request.id, PrefixReuse(tokens=CACHED_TOKENS, tier="ram"))
    worker.answer(request.id, CACHED_TOKENS)
    assert [*sse_documents(answer.iter_lines())][-1] == "[DONE]"


def test_a_salt_of_another_type_is_refused_by_name(system: System, worker: Worker) -> None:
    for name, value in (("cache_salt", 7), ("cache_salt", "x" * 257), ("cache_pin", "yes")):
        answer = system.http.post("/v1/chat/completions", json=chat_body("hello", **{name: value}))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_operators_see_requests_and_caches_as_the_worker_last_told_them(
    system: System, worker: Worker
) -> None:
    row = RequestStatus(
        id="chatcmpl-1",
        phase="prefill",
        prompt_tokens=PROMPT_TOKENS,
        prefilled=1500,
        reuse=PrefixReuse(tokens=1500),
    )
    top = TopPrefix(tokens=1500, uses=12, bytes=2**20)
    prefix = PrefixStatus(ram_bytes=2**20, ram_limit=2**30, lookups=4, hits=3, misses={"cold": 1}, top=[top])
    worker.beat([row], prefix)
    status = eventually(
        lambda: (s := system.http.get("/v1/status").json()) and s["workers"][0]["rows"] and s, within_s=WAIT_S
    )
    assert status["gateway"]["uptime_s"] > 0
    [seen] = status["workers"]
    assert (seen["model"], seen["state"], seen["pid"], seen["running"]) == ("org/model", "ready", 7, 1)
    assert seen["rows"][0]["reuse"] == {"tokens": 1500, "tier": "none", "miss": ""}
    [cache] = system.http.get("/v1/cache").json()["data"]
    assert (cache["ram_limit"], cache["hit_rate"], cache["misses"]) == (2**30, 0.75, {"cold": 1})
    assert cache["top"] == [{"tokens": 1500, "uses": 12, "bytes": 2**20, "pinned": False}]


def test_a_cache_is_cleared_when_its_worker_says_so(
    system: System, worker: Worker, pool: ThreadPoolExecutor
) -> None:
    asked = pool.submit(system.http.delete, "/v1/cache", params={"model": "org/model"})
    order = worker.next(ClearCache)
    worker.say(CacheCleared(incarnation=worker.name, id=order.id, ram_bytes=2**30, disk_bytes=2**32))
    answer = asked.result(WAIT_S)
    assert answer.status_code == 200
    assert answer.json()["data"] == [{"model": "org/model", "ram_bytes": 2**30, "disk_bytes": 2**32}]


def test_a_worker_that_does_not_answer_is_a_504(
    system: System, worker: Worker, pool: ThreadPoolExecutor
) -> None:
    asked = pool.submit(system.http.delete, "/v1/cache")
    worker.next(ClearCache)
    answer = asked.result(WAIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_a_worker_that_dies_instead_is_a_503(system: System, pool: ThreadPoolExecutor) -> None:
    dying = Worker(system.endpoint, "dying", "org/dying")
    try:
        dying.serve()
        system.wait_ready()
        asked = pool.submit(system.http.delete, "/v1/cache", params={"model": "org/dying"})
        dying.next(ClearCache)
    finally:
        dying.close()
    answer = asked.result(WAIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    assert "retry-after" in answer.headers


def test_with_no_worker_there_is_nothing_to_clear(system: System) -> None:
    answer = system.http.delete("/v1/cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    assert system.http.get("/v1/cache").json()["data"] == []
