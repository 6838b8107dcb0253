"""HTTP clients that are odd or hostile get what they are due, and hold up nobody; others are attacks."""

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
ANSWER_S_MAX = 60.0
CALM_S, HI_S_MAX, SLOW_S_MAX = 0.1, 2.0, 10.0
"""Time of a short answer without an attack, its limit beside one, and beside one whose clients have yet to be
noticed: their buffers take a second, and the limit of pending output, 1536 steps, is not reached before. The
limits are those of a machine on which nothing else runs, and grow with the time without an attack."""
CONNECTIONS_MAX = 64
ROWS = 4
STEP_MS = 10


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    flags = ["--max-connections", str(CONNECTIONS_MAX)]
    with running_system(tmp_path_factory.mktemp("clients"), flags) as made:
        made.start_ready_worker("--step-ms", str(STEP_MS), "--max-running", str(ROWS))
        yield made


@pytest.fixture(autouse=True)
def slower(system: System) -> float:
    """Wait until no row is left of the test before; return by how much limits grow."""
    eventually(lambda: running(system) == in_flight(system) == 0, within_s=ANSWER_S_MAX)
    return max(1.0, answer_s(system) / CALM_S)


def answer_s(system: System) -> float:
    began = time.monotonic()
    assert system.http.post(CHAT, json=chat_body("hi !tokens=2")).status_code == 200
    return time.monotonic() - began


def request(text: str, version: str = "1.1", **fields: object) -> bytes:
    body = json.dumps(chat_body(text, **fields)).encode()
    head = f"POST {CHAT} HTTP/{version}\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def connect(system: System) -> socket.socket:
    return socket.create_connection(("127.0.0.1", system.port), ANSWER_S_MAX)


def rest(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    return b"".join(iter(lambda: client.recv(2**16), b""))


def exchange(system: System, data: bytes) -> bytes:
    """Send data and return everything that comes back."""
    with connect(system) as client:
        client.sendall(data)
        return rest(client)


def in_flight(system: System) -> int:
    return int(system.http.get("/v1/status").json()["gateway"]["in_flight"])


def running(system: System) -> int:
    [worker] = system.http.get("/v1/status").json()["workers"]
    return int(worker["running"])


def test_idle_connections_beyond_the_limit_turn_clients_away_until_they_time_out(system: System) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS_MAX):
            stack.enter_context(connect(system))
        assert b'"code":"too_many_connections"' in exchange(system, request("hi", "1.0"))
        eventually(
            lambda: exchange(system, request("hi", "1.0")).startswith(b"HTTP/1.1 200 "), within_s=ANSWER_S_MAX
        )


def test_body_of_millions_of_values_is_refused_and_holds_up_nobody(system: System) -> None:
    body = b'{"chat_template_kwargs":{"x":[' + b",".join([b"[]"] * 9_000_000) + b"]}," + b'"messages":[]}'
    answers: list[tuple[int, str]] = []

    def send() -> None:
        answer = system.http.post(CHAT, content=body)
        answers.append((answer.status_code, answer.json()["error"]["message"]))

    sender = threading.Thread(target=send)
    began = time.monotonic()
    sender.start()
    worst_s = 0.0
    while sender.is_alive():
        asked_at = time.monotonic()
        assert exchange(system, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        worst_s = max(worst_s, time.monotonic() - asked_at)
        sender.join(0.01)
    [(code, message)] = answers
    assert code == 413
    assert "131072 JSON arrays and objects" in message
    # Who is held up waits for most of the time that the body takes.
    assert worst_s < max(0.5, (time.monotonic() - began) / 3)


# --- clients that do not read ------------------------------------------------------------------------


def unread_stream(system: System, version: str = "1.1", **fields: object) -> socket.socket:
    """Ask for a stream that fills the client's buffers soon, and would take a quarter of an hour."""
    client = socket.socket()
    client.settimeout(ANSWER_S_MAX)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", system.port))
    client.sendall(request("!tokens=100000", version, stream=True, **fields))
    return client


def test_unread_streams_give_their_rows_to_others(system: System, slower: float) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(ROWS):
            stack.enter_context(unread_stream(system))
        for limit_s in (SLOW_S_MAX, HI_S_MAX, HI_S_MAX):
            eventually(lambda: running(system) == ROWS, within_s=ANSWER_S_MAX)
            assert answer_s(system) < limit_s * slower
            stack.enter_context(unread_stream(system))


def test_stream_that_is_read_too_late_ends_with_the_reason(system: System, slower: float) -> None:
    with unread_stream(system, "1.0", n=ROWS) as client:
        eventually(lambda: running(system) == ROWS, within_s=ANSWER_S_MAX)
        assert answer_s(system) < SLOW_S_MAX * slower
        assert b'"code":"client_too_slow"' in rest(client)
