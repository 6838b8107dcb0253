"""Invalid requests get an immediate 4xx in OpenAI's format, and do not affect other requests."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.scripted_worker.engine import TOKEN_BYTES
from tests.system import System, chat_body, eventually, running_system

ANSWER_S_MAX = 0.05
"""Maximum time of a refusal, which takes a few milliseconds."""
TRIES = 20

T = TypeVar("T")

HELLO = [{"role": "user", "content": "hi"}]


def nested(depth: int) -> bytes:
    return b'{"messages":' + b"[" * depth + b"]" * depth + b"}"


def with_field(name: str, value: object) -> bytes:
    return json.dumps({"messages": HELLO, name: value}).encode()


BAD = {
    "malformed JSON": (b'{"messages": ', 400, None),
    "an empty body": (b"", 400, None),
    "an array": (b"[1, 2]", 400, None),
    "null": (b"null", 400, None),
    "bytes that are not UTF-8": (b'{"model": "\xff\xfe"}', 400, None),
    "deep nesting": (nested(20_000), 400, None),
    "deep nesting where nobody looks": (nested(20_000).replace(b"messages", b"unknown"), 400, None),
    "NaN": (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, None),
    "no messages": (b"{}", 400, "messages"),
    "empty messages": (b'{"messages": []}', 400, "messages"),
    "messages of a wrong type": (b'{"messages": "hi"}', 400, "messages"),
    "an unknown role": (b'{"messages": [{"role": "wizard", "content": "x"}]}', 400, "messages[0].role"),
    "a numeric content": (b'{"messages": [{"role": "user", "content": 5}]}', 400, "messages[0].content"),
    "a text temperature": (with_field("temperature", "hot"), 400, "temperature"),
    "a temperature out of range": (with_field("temperature", 9), 400, "temperature"),
    "an infinite temperature": (with_field("temperature", 1e308 * 10), 400, None),
    "negative max_tokens": (with_field("max_tokens", -1), 400, "max_tokens"),
    "a stop of a wrong type": (with_field("stop", {"a": 1}), 400, "stop"),
    "more answers than one may ask for": (with_field("n", 17), 400, "n"),
    "a bias for no token": (with_field("logit_bias", {"the": 1}), 400, "logit_bias"),
    "likely tokens without logprobs": (with_field("top_logprobs", 3), 400, "top_logprobs"),
    "a penalty out of range": (with_field("presence_penalty", 2.5), 400, "presence_penalty"),
    "no schema where one is announced": (
        with_field("response_format", {"type": "json_schema", "json_schema": {}}),
        400,
        "response_format.json_schema.schema",
    ),
    "a schema that is none": (
        with_field("response_format", {"type": "json_schema", "json_schema": {"schema": "string"}}),
        400,
        "response_format.json_schema.schema",
    ),
    "an unknown format": (with_field("response_format", {"type": "yaml"}), 400, "response_format.type"),
    "a tag amid the text": (
        with_field("structured_outputs", {"structural_tag": "{}"}),
        400,
        "structured_outputs.structural_tag",
    ),
    "two forms at once": (
        with_field("structured_outputs", {"regex": "a", "choice": ["a"]}),
        400,
        "structured_outputs.regex",
    ),
    "no choice": (with_field("guided_choice", []), 400, "guided_choice"),
    "a pattern of a wrong type": (with_field("guided_regex", 7), 400, "guided_regex"),
    "an empty grammar": (with_field("guided_grammar", ""), 400, "guided_grammar"),
    "a schema as text that is none": (with_field("guided_json", "yes"), 400, "guided_json"),
    "a deep schema": (
        b'{"messages": [{"role": "user", "content": "x"}], "guided_json": {"a":'
        + b"[" * 20_000
        + b"]" * 20_000
        + b"}}",
        400,
        None,
    ),
    "a deep schema as text": (
        with_field("guided_json", '{"a":' + "[" * 20_000 + "]" * 20_000 + "}"),
        400,
        "guided_json",
    ),
    "a call without tools": (with_field("tool_choice", "required"), 400, "tool_choice"),
    "a call of an unknown tool": (
        with_field("tool_choice", {"type": "function", "function": {"name": "nope"}}),
        400,
        "tool_choice.function.name",
    ),
    "one call or several": (with_field("parallel_tool_calls", "no"), 400, "parallel_tool_calls"),
    "an image for a model without eyes": (
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
                ]
            }
        ).encode(),
        400,
        "messages[0].content[0]",
    ),
    "an unknown model": (with_field("model", "no-such-model"), 404, "model"),
    "a tool schema with a number no wire carries": (
        with_field(
            "tools", [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**70}}}]
        ),
        400,
        None,
    ),
}


def at_once(ask: Callable[[], T]) -> T:
    """Return an answer that took milliseconds; repeated a few times, because the machine may be busy."""
    for _ in range(TRIES):
        began = time.monotonic()
        answer = ask()
        if time.monotonic() - began < ANSWER_S_MAX:
            return answer
    raise AssertionError(f"slower than {ANSWER_S_MAX} s, {TRIES} times")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", BAD)
def test_a_wrong_request_is_refused_at_once_and_named(
    fake_system_shared: System, name: str, stream: bool
) -> None:
    body, status, param = BAD[name]
    if stream:
        body = body.replace(b'{"messages"', b'{"stream": true, "messages"', 1)
    answer = at_once(lambda: fake_system_shared.http.post("/v1/chat/completions", content=body))
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] == param
    assert answer.headers["x-request-id"]


@pytest.fixture(scope="module")
def fake_system_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("bad")) as system:
        system.start_worker()
        system.wait_ready()
        yield system


def test_a_prompt_beyond_the_context_is_refused_before_a_stream_begins(fake_system_shared: System) -> None:
    answer = fake_system_shared.http.post("/v1/chat/completions", json=chat_body("word " * 9000, stream=True))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_hundred_megabytes_are_refused_before_they_are_sent(fake_system_shared: System) -> None:
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 104857600\r\n\r\n"

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", fake_system_shared.port), timeout=5) as connection:
            connection.sendall(head.encode() + b"{")
            return b"".join(iter(lambda: connection.recv(65536), b""))

    answer = at_once(ask)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"request_too_large"' in answer


def test_a_client_that_sends_a_hundred_megabytes_anyway_hears_the_refusal(fake_system_shared: System) -> None:
    answer = httpx.post(
        fake_system_shared.url + "/v1/chat/completions", content=b"x" * 100 * 2**20, timeout=30
    )
    assert answer.status_code == 413


def test_a_body_that_grows_without_saying_so_is_refused(fake_system_shared: System) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 2**20

    answer = httpx.post(fake_system_shared.url + "/v1/chat/completions", content=chunks(), timeout=30)
    assert answer.status_code == 413


def test_beyond_capacity_the_answer_is_a_503_at_once_that_names_who_is_there(tmp_path: Path) -> None:
    with running_system(tmp_path, ["--max-waiting", "1"]) as system, contextlib.ExitStack() as held:
        system.start_worker("--max-running", "2")
        system.wait_ready()
        body = chat_body("!tokens=8000 !slow=50", stream=True)
        for _ in range(3):
            # The headers arrive once it is accepted, so from here on it occupies its place.
            stream = system.http.stream("POST", "/v1/chat/completions", json=body)
            assert held.enter_context(stream).status_code == 200
        refused = eventually(lambda: _refusal(system, running=2), within_s=10, what="two run and one waits")
        error = refused.json()["error"]
        assert error["code"] == "text_generation_busy"
        assert error["waiting"] == 1
        assert len(error["running_ids"]) == 2
        assert "2 requests are running and 1 are waiting" in error["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert at_once(lambda: _refusal(system, running=2))
        held.close()
        system.wait_for("/ready")
        eventually(lambda: not _refusal(system, running=2), within_s=10, what="requests are accepted again")


def _refusal(system: System, *, running: int) -> httpx.Response | None:
    answer = system.http.post("/v1/chat/completions", json=chat_body("hi !tokens=1"))
    if answer.status_code == 503 and answer.json()["error"]["running"] == running:
        return answer
    return None


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_memory_never_holds_gets_a_400_beside_one_that_runs(
    tmp_path: Path, stream: bool
) -> None:
    with running_system(tmp_path) as system:
        system.start_worker("--cache-limit-bytes", str(500 * TOKEN_BYTES), "--step-ms", "5")
        system.wait_ready()
        [model] = system.http.get("/v1/models").json()["data"]
        assert model["context_length"] == 447
        neighbour = ask(system.url, "!tokens=100")
        wait_until_flowing([neighbour])
        for words in (447, 600, 9000):  # the last one also exceeds the model's own context
            body = chat_body("word " * words, stream=stream)
            answer = system.http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert "447 tokens in the memory of this server" in answer.json()["error"]["message"]
            assert f"resulted in {words} tokens" in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == "messages"
        longest = system.http.post("/v1/chat/completions", json=chat_body("word " * 446, stream=stream))
        assert longest.status_code == 200
        wait_for([neighbour], 30)
        assert neighbour.texts == [scripted("!tokens=100", 100)]
