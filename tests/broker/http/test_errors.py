"""An API's errors look as that API has them, wherever they come from."""

from __future__ import annotations

from typing import Any

import pytest

from broker.http import errors
from protocol.errors import RequestError
from tests.broker.asgi import run
from tests.broker.dispatching import failed
from tests.broker.house import TEXT, House


def terse(error: RequestError, request_id: str) -> dict[str, Any]:
    return {"told": str(error.code)}


@pytest.fixture
def two_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if completions were an API with an error object of its own."""
    monkeypatch.setattr(errors, "ENVELOPES", ((TEXT, terse), *errors.ENVELOPES))


@pytest.mark.usefixtures("two_shapes")
def test_what_is_refused_or_fails_is_told_in_the_shape_of_the_api_that_was_asked(house: House) -> None:
    async def talk() -> None:
        assert (await house.text(best_of=3).end()).json == {"told": "unsupported_parameter"}
        assert (await house.get(TEXT).end()).json == {"told": "method_not_allowed"}
        answer = house.text()
        house.line.say("w", failed("w", await house.arrived()))
        assert (await answer.end()).json == {"told": "engine_error"}
        assert (await house.chat(temperature=9).end()).error["code"] == "invalid_request"

    run(talk())


@pytest.mark.usefixtures("two_shapes")
def test_who_has_no_key_is_told_in_the_shape_of_the_api_that_was_asked() -> None:
    house = House(api_keys=("rh-one",))

    async def talk() -> None:
        assert (await house.text().end()).json == {"told": "invalid_api_key"}
        assert (await house.chat().end()).error["code"] == "invalid_api_key"

    run(talk())
