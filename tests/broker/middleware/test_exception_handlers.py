"""Unknown routes, and exceptions in a route."""

from __future__ import annotations

import pytest

from broker.api.chat import body as chat_body
from tests.broker.application import CHAT, House


async def test_an_address_without_anything_or_without_the_method_is_an_error_object(house: House) -> None:
    for path in ("/page", "/v1/chat", "/v1/%00", "/v1/status/"):
        answer = await house.get(path).end()
        assert (answer.status, answer.error["code"]) == (404, "route_not_found")
        assert answer.error["type"] == "invalid_request_error"
        assert path in answer.error["message"]
        assert ("requests /v1/status." in answer.error["message"]) is (path == "/v1/status/")
    for path in (
        "/v1/v1/chat/completions", "/chat/completions", "/v1/chat/completions/", "/v1//chat/completions",
        "/openai/deployments/pocket/chat/completions", "/openai/v1/chat/completions",
        "/api/v1/chat/completions",
        "/v1/chat/completions/chat/completions",
    ):  # fmt: skip
        answer = await house.post(path).end()
        assert answer.status == 404
        assert answer.error["message"].endswith("so that it requests /v1/chat/completions.")
    answer = await house.post("/api/chat").end()
    assert answer.error["message"].endswith("use OpenAI's, with a base URL that ends in /v1.")
    socket = await house.get("/v1/responses", sec_websocket_key="x", sec_websocket_version="13").end()
    assert (socket.status, socket.error["code"]) == (426, "websocket_unsupported")
    assert socket.headers["upgrade"] == "HTTP/1.1"
    for method, path in (("GET", CHAT), ("DELETE", "/v1/models")):
        answer = await house.get(path, method).end()
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert method in answer.error["message"]
        assert method not in answer.headers["allow"]


async def test_an_unhandled_exception_is_an_error_object_and_says_nothing_of_itself(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(chat_body, "read", break_down)
    answer = house.chat()
    with pytest.raises(ZeroDivisionError):
        await answer.end()
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-request-id"].startswith("req_")
    assert b"secret" not in answer.body
    assert (await house.get("/health").end()).status == 200
    [record] = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)
