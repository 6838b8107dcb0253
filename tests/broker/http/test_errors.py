"""Errors have the format of the requested API, whichever component raises them."""

from __future__ import annotations

from typing import Any

import pytest

from broker.http import errors
from protocol.errors import RequestError
from tests.broker.application import TEXT, House
from tests.factories import failed


def terse(error: RequestError, request_id: str) -> dict[str, Any]:
    return {"told": str(error.code)}


@pytest.fixture
def two_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give completions an error format of its own."""
    monkeypatch.setattr(errors, "ENVELOPES", ((TEXT, terse), *errors.ENVELOPES))


@pytest.mark.usefixtures("two_shapes")
async def test_errors_use_the_format_of_the_requested_api(house: House) -> None:
    assert (await house.text(best_of=3).end()).json == {"told": "unsupported_parameter"}
    assert (await house.get(TEXT).end()).json == {"told": "method_not_allowed"}
    answer = house.text()
    house.line.say("w", failed("w", await house.arrived()))
    assert (await answer.end()).json == {"told": "engine_error"}
    assert (await house.chat(temperature=9).end()).error["code"] == "invalid_request"


@pytest.mark.usefixtures("two_shapes")
async def test_missing_api_key_error_uses_the_format_of_the_requested_api() -> None:
    house = House(api_keys=("rh-one",))
    assert (await house.text().end()).json == {"told": "invalid_api_key"}
    assert (await house.chat().end()).error["code"] == "invalid_api_key"
