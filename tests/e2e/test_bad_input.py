"""Invalid requests get an immediate 4xx in OpenAI's format, and do not affect other requests."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx
import pytest

from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.scripted_worker.engine import TOKEN_BYTES
from tests.system import NO_TLS, System, chat_body, eventually, running_system

ANSWER_S_MAX = 0.05
"""Maximum time of a refusal, which takes a few milliseconds; on a slower machine, this many exchanges:"""
EXCHANGES_MAX = 10
TRIES = 20

T = TypeVar("T")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Yield a gateway with little room, a worker that runs two requests, and one with little memory."""
    with running_system(tmp_path_factory.mktemp("narrow"), ["--max-waiting", "1"]) as system:
        system.start_worker("--max-running", "2")
        memory = str(500 * TOKEN_BYTES)
        system.start_worker("--served-name", "small", "--cache-limit-bytes", memory, "--step-ms", "5")
        system.wait_loaded(2)
        yield system


def nested(depth: int) -> bytes:
    return b'{"messages":' + b"[" * depth + b"]" * depth + b"}"


def with_field(name: str, value: object) -> bytes:
    fields = {"messages": [{"role": "user", "content": "hi"}], "model": "fake", name: value}
    return json.dumps(fields).encode()


DEEP_SCHEMA = '{"a":' + "[" * 20_000 + "]" * 20_000 + "}"
BIG_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**70}}}
BAD = {
    "malformed JSON": (b'{"messages": ', 400, None),
    "bytes that are not UTF-8": (b'{"model": "\xff\xfe"}', 400, None),
    "deep nesting": (nested(20_000), 400, None),
    "a temperature out of range": (with_field("temperature", 9), 400, "temperature"),
    "a deep schema as text": (with_field("guided_json", DEEP_SCHEMA), 400, "guided_json"),
    "an unknown model": (with_field("model", "no-such-model"), 404, "model"),
    "a tool schema with a number no wire carries": (with_field("tools", [BIG_TOOL]), 400, None),
}


def at_once(system: System, ask: Callable[[], T]) -> T:
    """Return an answer that took milliseconds; repeated a few times, because the machine may be busy."""
    for _ in range(TRIES):
        times = [time.monotonic()]
        system.http.get("/health")
        times.append(time.monotonic())
        answer = ask()
        exchange_s, answer_s = times[1] - times[0], time.monotonic() - times[1]
        if answer_s < max(ANSWER_S_MAX, EXCHANGES_MAX * exchange_s):
            return answer
    raise AssertionError(f"slower than {ANSWER_S_MAX} s and {EXCHANGES_MAX} exchanges, {TRIES} times")


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_request_is_refused_at_once_and_named(system: System, name: str) -> None:
    body, status, param = BAD[name]
    for each in (body, body.replace(b'{"messages"', b'{"stream": true, "messages"', 1)):
        answer = at_once(system, lambda each=each: system.http.post("/v1/chat/completions", content=each))
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert error["param"] == param
        assert answer.headers["x-request-id"]


def test_a_hundred_megabytes_are_refused_before_they_are_sent(system: System) -> None:
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 104857600\r\n\r\n"

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", system.port), timeout=60) as connection:
            connection.sendall(head.encode() + b"{")
            return b"".join(iter(lambda: connection.recv(65536), b""))

    answer = at_once(system, ask)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"request_too_large"' in answer


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_client_that_sends_too_much_anyway_hears_the_refusal(system: System, is_announced: bool) -> None:
    pieces = [b"x" * 2**20] * 40
    content = b"".join(pieces) if is_announced else iter(pieces)
    answer = httpx.post(system.url + "/v1/chat/completions", content=content, timeout=60, verify=NO_TLS)
    assert answer.status_code == 413


def test_beyond_capacity_the_answer_is_a_503_at_once_that_names_who_is_there(narrow: System) -> None:
    body = chat_body("!tokens=8000 !slow=50", model="fake", stream=True)
    with contextlib.ExitStack() as held:
        for _ in range(3):
            # The headers arrive once it is accepted, so from here on it occupies its place.
            stream = narrow.http.stream("POST", "/v1/chat/completions", json=body)
            assert held.enter_context(stream).status_code == 200
        refused = eventually(lambda: _refusal(narrow, running=2), within_s=60, what="two run and one waits")
        error = refused.json()["error"]
        assert (error["code"], error["waiting"]) == ("text_generation_busy", 1)
        assert len(error["running_ids"]) == 2
        assert int(refused.headers["retry-after"]) >= 1
        assert at_once(narrow, lambda: _refusal(narrow, running=2))
    eventually(lambda: not _refusal(narrow, running=2), within_s=60, what="requests are accepted again")


def _refusal(system: System, *, running: int) -> httpx.Response | None:
    answer = system.http.post("/v1/chat/completions", json=chat_body("hi !tokens=1", model="fake"))
    if answer.status_code == 503 and answer.json()["error"]["running"] == running:
        return answer
    return None


def test_a_prompt_that_memory_never_holds_gets_a_400_beside_one_that_runs(narrow: System) -> None:
    assert narrow.http.get("/v1/models/small").json()["context_length"] == 447
    neighbour = ask(narrow.url, "!tokens=100", model="small")
    wait_until_flowing([neighbour])
    # The last one also exceeds the model's own context.
    for words, stream in ((447, True), (9000, False)):
        body = chat_body("word " * words, model="small", stream=stream)
        answer = narrow.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "447 tokens in the memory of this server" in error["message"]
        assert f"resulted in {words} tokens" in error["message"]
    longest = narrow.http.post("/v1/chat/completions", json=chat_body("word " * 446, model="small"))
    assert longest.status_code == 200
    wait_for([neighbour], 60)
    assert neighbour.texts == [scripted("!tokens=100", 100)]
