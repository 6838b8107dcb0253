"""Models of an endpoint, and the choice of one."""

from __future__ import annotations

import pytest

from deploy.agents.models import LaunchError, choose, is_near, read
from deploy.agents.profiles import Endpoint, Model
from deploy.console.http import models_of
from tests.hosts import endpoint_that_answers

LARGE = Model("large", 131072, loaded=False)
SMALL = Model("small", 4096, ("gpt-4o-mini",))


def test_generating_models_are_read_in_listed_order() -> None:
    listed = [
        {"id": "large", "object": "model", "created": 1, "context_length": 131072, "state": "unloaded"},
        {"id": "small", "context_length": 4096, "state": "loaded", "aliases": ["gpt-4o-mini"]},
        {"id": "unmeasured", "tasks": ["generate"]},
        {"id": "embedder", "tasks": ["embed"]},
    ]
    assert read({"object": "list", "data": listed}) == [LARGE, SMALL, Model("unmeasured")]


def test_a_model_is_chosen_by_name_or_alias_or_else_needs_no_loading() -> None:
    assert choose([LARGE, SMALL], None) is SMALL
    assert choose([LARGE], None) is LARGE
    for name in ("small", "gpt-4o-mini"):
        assert choose([LARGE, SMALL], name) is SMALL


@pytest.mark.parametrize(
    ("models", "name", "said"),
    [
        ([LARGE, SMALL], "smal", r"does not serve a model smal; did you mean small\?"),
        ([], None, "serves no model yet"),
    ],
)
def test_an_unknown_name_is_answered_with_what_there_is(
    models: list[Model], name: str | None, said: str
) -> None:
    with pytest.raises(LaunchError, match=said):
        choose(models, name)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"{}", "requires an API key"),
        (503, b'{"error": {"message": "The server is shutting down."}}', "The server is shutting down."),
        (404, b"<html>", "404: this is not an OpenAI-compatible endpoint"),
        (200, b"<html>", "is not a JSON object"),
        (200, b"{}", "did not return a list of models"),
    ],
)
def test_a_refusal_is_handed_on_in_a_sentence(status: int, body: bytes, said: str) -> None:
    with (
        endpoint_that_answers({"/v1/models": (status, body)}) as served,
        pytest.raises(LaunchError, match=said),
    ):
        models_of(Endpoint(served.url))


@pytest.mark.parametrize("url", ["file:///etc", "http://127.0.0.1:port", "http://[::1"])
def test_invalid_endpoint_url_is_refused(url: str) -> None:
    with pytest.raises(LaunchError, match="is not a valid URL"):
        models_of(Endpoint(url))


def test_no_proxy_leads_to_this_machine() -> None:
    assert all(map(is_near, ["http://127.0.0.1:8000", "http://[::1]:8000", "http://localhost"]))
    assert not any(map(is_near, ["http://192.168.1.2:8000", "https://models.example.com"]))
