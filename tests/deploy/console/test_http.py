"""HTTP client of the console, and its error messages."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import httpx
import pytest

from deploy.agents.profiles import Endpoint
from deploy.console import http
from deploy.console.http import AnswerDelta, ConsoleError

ENDPOINT = Endpoint("http://127.0.0.1:8000", "sesame")

Answer = Callable[[httpx.Request], httpx.Response]


def client(answer: Answer) -> httpx.Client:
    return httpx.Client(base_url=ENDPOINT.url, transport=httpx.MockTransport(answer))


def events(*documents: object) -> bytes:
    told = [": a comment", *(f"data: {json.dumps(document)}" for document in documents), "data: [DONE]"]
    return "\n\n".join(told).encode() + b"\n\n"


def choice(delta: dict[str, str], reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def test_an_answer_comes_in_pieces_thoughts_apart() -> None:
    asked: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.read())
        body = events(
            choice({"role": "assistant", "content": ""}),
            choice({"reasoning_content": "hm", "reasoning": "hm"}),
            choice({"content": "駅"}),
            choice({}, "stop"),
            {"choices": [], "usage": {}},
        )
        return httpx.Response(200, content=body)

    with client(answer) as asking:
        pieces = list(http.stream(asking, {"model": "m"}))
    assert pieces == [AnswerDelta("thought", "hm"), AnswerDelta("text", "駅"), AnswerDelta("end", "stop")]
    assert json.loads(asked[0]) == {"model": "m", "stream": True, "stream_options": {"include_usage": True}}


def test_an_error_in_the_middle_of_an_answer_is_told() -> None:
    body = events(choice({"content": "a"}), {"error": {"message": "the worker is gone"}})
    with client(lambda request: httpx.Response(200, content=body)) as asking:
        pieces = http.stream(asking, {})
        assert next(pieces).text == "a"
        with pytest.raises(ConsoleError, match="failed: the worker is gone"):
            next(pieces)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (httpx.Response(404, json={"error": {"message": "No model `x`."}}), "No model `x`."),
        (httpx.Response(401, json={"error": {"message": "Incorrect."}}), "set ROUNDHOUSE_API_KEYS"),
        (httpx.Response(502, content=b"<html>"), "returned 502: this is not an OpenAI"),
        (httpx.Response(200, content=b"\xff"), "not a JSON object"),
    ],
)
def test_refusals_are_sentences(answer: httpx.Response, told: str) -> None:
    with client(lambda request: answer) as asking, pytest.raises(ConsoleError, match=told):
        http.get(asking, "/v1/status")


def test_server_that_cannot_clear_its_cache_says_why() -> None:
    error = {"error": {"message": "No reply from m within 5 s."}}
    with client(lambda request: httpx.Response(504, json=error)) as asking:
        assert http.clear_cache(asking) == "No reply from m within 5 s."


def test_an_endpoint_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "DOCUMENT_S_MAX", 0.05)
    monkeypatch.setattr(http, "SILENCE_S_MAX", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = Endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with http.open_client(endpoint) as client:
            with pytest.raises(ConsoleError, match="timed out"):
                http.get(client, "/v1/status")
            with pytest.raises(ConsoleError, match="timed out"):
                list(http.stream(client, {}))
