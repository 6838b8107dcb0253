"""HTTP clients that are odd or hostile: each gets what it is due, and the others are not held up."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.system import System, chat_body, eventually, running_system

CHAT = "/v1/chat/completions"
ANSWER_S_MAX = 20.0
HI_S_MAX = 2.0
"""Maximum time of a short answer beside an attack."""
CONNECTIONS_MAX, IDLE_CONNECTIONS = 64, 300
ROWS = 8
STEP_MS = 10
SLOW_S_MAX = 10.0
"""Maximum time until clients that do not read are noticed. Their buffers take a second, and the limit of
pending output, 1536 steps, is not reached before."""
HEALTH_S_MAX = 0.5
"""Maximum time of a probe beside a hostile body; it takes a tenth of that where nothing else runs."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    flags = ["--max-connections", str(CONNECTIONS_MAX)]
    with running_system(tmp_path_factory.mktemp("clients"), flags) as made:
        made.start_worker("--step-ms", str(STEP_MS), "--max-running", str(ROWS))
        made.wait_ready()
        yield made


def request(text: str, version: str = "1.1", **fields: object) -> bytes:
    body = json.dumps(chat_body(text, **fields)).encode()
    return (
        f"POST {CHAT} HTTP/{version}\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


def connect(system: System) -> socket.socket:
    return socket.create_connection(("127.0.0.1", system.port), ANSWER_S_MAX)


def rest(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    return b"".join(iter(lambda: client.recv(2**16), b""))


def exchange(system: System, data: bytes, *, half_close: bool = False) -> tuple[bytes, bytes]:
    """Send data and return head and body of everything that comes back."""
    with connect(system) as client:
        client.sendall(data)
        if half_close:
            client.shutdown(socket.SHUT_WR)
        head, _, body = rest(client).partition(b"\r\n\r\n")
    return head, body


# --- half-closed connections and HTTP/1.0 ------------------------------------------------------------


def test_stream_to_an_http_1_0_client_has_no_chunks(system: System) -> None:
    head, body = exchange(system, request("!tokens=8", "1.0", stream=True))
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    assert all(event.startswith((b"data: ", b": ")) for event in body.removesuffix(b"\n\n").split(b"\n\n"))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_request_before_a_half_close_gets_its_whole_answer(
    system: System, stream: bool, version: str
) -> None:
    head, body = exchange(system, request("!tokens=50", version, stream=stream), half_close=True)
    assert head.startswith(b"HTTP/1.1 200 ")
    if stream:
        assert body.count(b'"content":"') == 51
        assert b"data: [DONE]\n\n" in body
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == 51


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_is_noticed_although_its_end_looks_like_a_half_close(
    system: System, stream: bool
) -> None:
    with connect(system) as client:
        client.sendall(request("!tokens=100000", stream=stream))
        eventually(lambda: in_flight(system) == 1, within_s=ANSWER_S_MAX)
    eventually(lambda: in_flight(system) == 0, within_s=HI_S_MAX)


def in_flight(system: System) -> int:
    return int(system.http.get("/v1/status").json()["gateway"]["in_flight"])


# --- pipelining --------------------------------------------------------------------------------------


def test_all_pipelined_requests_are_answered(system: System) -> None:
    get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connect(system) as client:
        client.sendall(get * 39 + get.replace(b"host: localhost", b"connection: close"))
        assert rest(client).count(b"HTTP/1.1 200 OK\r\n") == 40


# --- many connections --------------------------------------------------------------------------------


def test_idle_connections_give_way_to_new_clients(system: System) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE_CONNECTIONS):
            stack.enter_context(connect(system))
        for _ in range(3):
            began = time.monotonic()
            head, _ = exchange(system, request("hi", "1.0"))
            assert head.startswith(b"HTTP/1.1 200 ")
            assert time.monotonic() - began < HI_S_MAX


# --- bodies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[' + b",".join([b"{}"] * 9_000_000) + b"]}",
        b'{"chat_template_kwargs":{"x":[' + b",".join([b"[]"] * 9_000_000) + b"]}," + b'"messages":[]}',
    ],
    ids=["messages", "template"],
)
def test_body_of_millions_of_values_is_refused_and_holds_up_nobody(system: System, body: bytes) -> None:
    answers: list[tuple[int, str, str]] = []

    def send() -> None:
        answer = system.http.post(CHAT, content=body)
        error = answer.json()["error"]
        answers.append((answer.status_code, error["code"], error["message"]))

    sender = threading.Thread(target=send)
    sender.start()
    worst_s = 0.0
    while sender.is_alive():
        began = time.monotonic()
        head, _ = exchange(system, b"GET /health HTTP/1.0\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        worst_s = max(worst_s, time.monotonic() - began)
        sender.join(0.01)
    [(status, code, message)] = answers
    assert (status, code) == (413, "request_too_large")
    assert "131072 JSON arrays and objects" in message
    assert worst_s < HEALTH_S_MAX


# --- clients that do not read ------------------------------------------------------------------------


def unread_stream(system: System, version: str = "1.1", **fields: object) -> socket.socket:
    """Ask for a stream that fills the client's buffers soon."""
    client = socket.socket()
    client.settimeout(ANSWER_S_MAX)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", system.port))
    client.sendall(request("!tokens=100000", version, stream=True, **fields))
    return client


def running(system: System) -> int:
    [worker] = system.http.get("/v1/status").json()["workers"]
    return int(worker["running"])


@pytest.fixture
def idle_system(system: System) -> System:
    """Wait until the worker has reported that no row is left of the test before."""
    eventually(lambda: running(system) == 0, within_s=ANSWER_S_MAX)
    return system


def answer_s(system: System) -> float:
    began = time.monotonic()
    assert system.http.post(CHAT, json=chat_body("hi !tokens=2")).status_code == 200
    return time.monotonic() - began


def test_unread_streams_give_their_rows_to_others(idle_system: System) -> None:
    system = idle_system
    with contextlib.ExitStack() as stack:
        for _ in range(ROWS):
            stack.enter_context(unread_stream(system))
        eventually(lambda: running(system) == ROWS, within_s=ANSWER_S_MAX)
        assert answer_s(system) < SLOW_S_MAX
        for _ in range(3):
            stack.enter_context(unread_stream(system))
            eventually(lambda: running(system) == ROWS, within_s=ANSWER_S_MAX)
            assert answer_s(system) < HI_S_MAX
    eventually(lambda: in_flight(system) == 0, within_s=ANSWER_S_MAX)


def test_stream_that_is_read_too_late_ends_with_the_reason(idle_system: System) -> None:
    system = idle_system
    with unread_stream(system, "1.0", n=ROWS) as client:
        eventually(lambda: running(system) == ROWS, within_s=ANSWER_S_MAX)
        assert answer_s(system) < SLOW_S_MAX
        assert b'"code":"client_too_slow"' in rest(client)
