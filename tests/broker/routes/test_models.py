"""GET /v1/models."""

from __future__ import annotations

import time
from datetime import datetime

from tests.broker.application import House
from tests.broker.asgi import run


def test_models_are_those_that_workers_have_named() -> None:
    house = House()

    async def talk() -> None:
        assert (await house.get("/v1/models").end()).json == {"object": "list", "data": []}
        house.line.serving("w2", "org/small")
        house.line.hello("w1", "a-model")
        listed = (await house.get("/v1/models").end()).json["data"]
        assert [model["id"] for model in listed] == ["a-model", "org/small"]
        assert [model.get("context_length") for model in listed] == [None, 8192]
        for model in listed:
            assert (model["object"], model["owned_by"]) == ("model", "roundhouse")
            assert abs(model["created"] - time.time()) < 60
            assert (await house.get(f"/v1/models/{model['id']}").end()).json == model
        house.line.dispatcher.lost("w2")
        assert (await house.get("/v1/models/org/small").end()).status == 200

    run(talk())


def test_a_client_of_anthropics_is_shown_models_as_it_knows_them() -> None:
    house = House()
    version = {"anthropic_version": "2023-06-01"}

    async def talk() -> None:
        empty = (await house.get("/v1/models", **version).end()).json
        assert empty == {"data": [], "has_more": False, "first_id": None, "last_id": None}
        house.line.serving("w2", "org/small")
        house.line.hello("w1", "a-model")
        document = (await house.get("/v1/models", **version).end()).json
        assert (document["first_id"], document["last_id"]) == ("a-model", "org/small")
        assert [model["max_input_tokens"] for model in document["data"]] == [None, 8192]
        for model in document["data"]:
            assert (model["type"], model["display_name"]) == ("model", model["id"])
            seen_at = datetime.fromisoformat(model["created_at"])
            assert abs(seen_at.timestamp() - time.time()) < 60
            assert (await house.get(f"/v1/models/{model['id']}", **version).end()).json == model

    run(talk())


def test_a_model_that_is_not_there_is_not_found(house: House) -> None:
    async def talk() -> None:
        answer = await house.get("/v1/models/org/other").end()
        assert answer.status == 404
        assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")

    run(talk())
