"""Which models an endpoint has, and which one is meant."""

from __future__ import annotations

import json

import pytest

from deploy.agents.models import LaunchError, ask, choose, is_near, read
from deploy.agents.setups import Endpoint, Model
from tests.deploy.agents.endpoints import endpoint_that_answers
from tests.system import free_port

LARGE = Model("large", 131072, loaded=False)
SMALL = Model("small", 4096, ("gpt-4o-mini",))


def test_the_list_is_read_as_the_gateway_writes_it() -> None:
    listed = [
        {"id": "large", "object": "model", "created": 1, "context_length": 131072, "state": "unloaded"},
        {"id": "small", "context_length": 4096, "state": "loaded", "aliases": ["gpt-4o-mini"]},
        {"id": "unmeasured"},
    ]
    body = json.dumps({"object": "list", "data": listed}).encode()
    assert read(body) == [LARGE, SMALL, Model("unmeasured")]


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"data": [{"name": "x"}]}', b'{"data": "\xff"}'])
def test_what_is_no_list_of_models_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(LaunchError, match="no list of models"):
        read(body)


def test_without_a_name_it_is_one_that_need_not_be_loaded_first() -> None:
    assert choose([LARGE, SMALL], None) is SMALL
    assert choose([LARGE], None) is LARGE


@pytest.mark.parametrize("name", ["small", "gpt-4o-mini"])
def test_a_name_and_an_alias_are_found(name: str) -> None:
    assert choose([LARGE, SMALL], name) is SMALL


def test_an_unknown_name_is_answered_with_the_one_that_may_be_meant_or_all() -> None:
    with pytest.raises(LaunchError, match=r"no model smal is served there; did you mean small\?"):
        choose([LARGE, SMALL], "smal")
    with pytest.raises(LaunchError, match="there is: large, small, gpt-4o-mini"):
        choose([LARGE, SMALL], "qwen")


def test_an_endpoint_without_models_is_not_ready_yet() -> None:
    with pytest.raises(LaunchError, match="no model is served there yet"):
        choose([], None)


def test_models_are_asked_for_with_the_key() -> None:
    with endpoint_that_answers({"/v1/models": (200, b'{"data": [{"id": "m"}]}')}) as served:
        assert ask(Endpoint(served.url, "s3cret")) == [Model("m")]
    assert served.asked == [("/health", "Bearer s3cret"), ("/v1/models", "Bearer s3cret")]


def test_where_nothing_runs_it_says_how_to_start_it() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(LaunchError, match=rf"nothing answers at {url} .* `roundhouse serve`"):
        ask(Endpoint(url))


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"{}", "wants an API key"),
        (503, b'{"error": {"message": "The server is shutting down."}}', "503: The server is shutting down."),
        (404, b"<html>", "404: that is no endpoint of ours"),
    ],
)
def test_a_refusal_is_handed_on_in_a_sentence(status: int, body: bytes, said: str) -> None:
    with (
        endpoint_that_answers({"/v1/models": (status, body)}) as served,
        pytest.raises(LaunchError, match=said),
    ):
        ask(Endpoint(served.url))


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "file:///etc", "http://", "http://127.0.0.1:port", "http://[::1"]
)
def test_what_is_no_address_is_not_asked(url: str) -> None:
    with pytest.raises(LaunchError, match="is no address"):
        ask(Endpoint(url))


@pytest.mark.parametrize(
    ("url", "near"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://localhost", True),
        ("http://192.168.1.2:8000", False),
        ("https://models.example.com", False),
    ],
)
def test_no_proxy_leads_to_this_machine(url: str, near: bool) -> None:
    assert is_near(url) is near
