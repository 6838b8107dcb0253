"""GET /openapi.json."""

from __future__ import annotations

from typing import Any

import pytest

from broker import app
from broker.api.openapi.operations import OPERATIONS
from broker.dialects import anthropic
from broker.middleware.auth import PROBES
from broker.middleware.errors import ENVELOPES
from broker.page import page
from protocol.errors import Code, RequestError
from tests.broker.application import House

UNTOLD = {("GET", "/")} | {(method, path) for path in page.PATHS - {"/"} for method in ("GET", "HEAD")}
"""Undocumented routes: those of the page, except `HEAD /`, which programs use as a liveness check."""


def routed() -> set[tuple[str, str]]:
    """Return method and path of each documented route, HEAD only where there is no GET."""
    found = {
        (method, route.path.replace(":path", "")) for route in app.ROUTES for method in route.methods or ()
    }
    gets = {path for method, path in found - UNTOLD if method == "GET"}
    return {(method, path) for method, path in found - UNTOLD if method != "HEAD" or path not in gets}


async def test_every_route_is_in_the_document_and_no_other_is(house: House) -> None:
    exchange = await house.get("/openapi.json").end()
    assert (exchange.status, exchange.headers["content-type"]) == (200, "application/json")
    told = {(method.upper(), path) for path, of in exchange.json["paths"].items() for method in of}
    assert told == routed()
    head = await house.get("/openapi.json", method="HEAD").end()
    assert (head.status, head.headers["content-length"]) == (200, str(len(exchange.body)))


@pytest.mark.parametrize("keys", [(), ("sesame",)])
async def test_the_document_says_whether_a_key_is_needed_and_needs_one_then(keys: tuple[str, ...]) -> None:
    keyed = House(api_keys=keys)
    refused = await keyed.get("/openapi.json").end()
    assert refused.status == (401 if keys else 200)
    document: Any = (await keyed.get("/openapi.json", x_api_key="sesame").end()).json
    assert ({} in document["security"]) != bool(keys)
    is_open = {path for path, of in document["paths"].items() if of.get("get", {}).get("security") == []}
    assert is_open == PROBES


def test_every_error_is_described_in_the_envelope_that_it_comes_in() -> None:
    for operation in OPERATIONS:
        envelope = next(made for beginning, made in ENVELOPES if operation.path.startswith(beginning))
        told = envelope(RequestError(Code.INVALID_REQUEST), "id")
        expected = anthropic.error_object(RequestError(Code.INVALID_REQUEST), "id")
        assert (operation.dialect == "anthropic") == (told == expected), operation.path
