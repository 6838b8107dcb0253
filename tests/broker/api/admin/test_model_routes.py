"""GET /v1/models."""

from __future__ import annotations

import time
from datetime import datetime

import pytest
from msgspec.structs import replace

from broker.api.admin.model_routes import CHOICE_BYTES_MAX
from protocol.messages import Loading
from protocol.supervisor_messages import ModelState, ModelStates
from protocol.types import Capabilities, KVCacheQuantization
from tests.broker.application import House
from tests.broker.dispatcher_line import ready


async def test_models_are_those_that_workers_have_named() -> None:
    house = House()
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
    for name in ("org/small", "org/small:latest"):
        assert (await house.get(f"/v1/models/{name}").end()).json["id"] == "org/small"
    assert await house.get("/v1/models/org/other").refusal() == (404, "model_not_found", "model")
    # Codex decodes this array, and other clients do not expect it.
    assert (await house.get("/v1/models?client_version=0.169.0").end()).json["models"] == []


async def test_quantized_kv_caches_are_told() -> None:
    house = House()
    house.line.serving("w1", "exact")
    house.line.serving("w2", "lossy")
    settings = KVCacheQuantization(bits=8, group_size=64)
    house.line.dispatcher.on_message("w2", replace(ready("w2", "lossy"), kv_quantization=settings))
    exact, lossy = (await house.get("/v1/models").end()).json["data"]
    assert "kv_cache" not in exact
    assert lossy["kv_cache"] == {"bits": 8, "group_size": 64}


async def test_what_a_model_cannot_do_is_told_with_the_reason() -> None:
    house = House()
    house.line.serving("w1", "able")
    house.line.serving("w2", "blind")
    lacking = Capabilities(unread=["tool_calls"], image_problem="its weights have no vision tower")
    house.line.dispatcher.on_message("w2", replace(ready("w2", "blind"), capabilities=lacking))
    able, blind = (await house.get("/v1/models").end()).json["data"]
    assert not {"unread", "image_problem"} & able.keys()
    assert (blind["unread"], blind["image_problem"]) == (["tool_calls"], "its weights have no vision tower")


async def test_a_client_of_anthropics_is_shown_models_as_it_knows_them() -> None:
    house = House()
    version = {"anthropic_version": "2023-06-01"}
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


async def test_models_are_loaded_and_unloaded_on_order(house: House) -> None:
    spare(house)
    loaded = await house.post("/v1/models/load", model="org/spare").end()
    assert (loaded.status, loaded.json["id"], loaded.json["state"]) == (200, "org/spare", "unloaded")
    assert house.line.told[-1].wanted == ["org/spare"]
    await house.post("/v1/models/unload", model="org/spare").end()
    assert house.line.told[-1].wanted == []
    assert await house.post("/v1/models/load", model="nope").refusal() == (404, "model_not_found", "model")
    refused = await house.post("/v1/models/unload", model="org/model").refusal()
    assert refused == (400, "invalid_request", "model")
    assert await house.post("/v1/models/load").refusal() == (400, "invalid_request", "model")
    large = await house.post("/v1/models/load", model="m" * CHOICE_BYTES_MAX).end()
    assert large.status == 413


def spare(house: House) -> House:
    states = ModelStates(models=[ModelState(name="org/spare")], on_demand=True)
    house.line.dispatcher.catalogue.on_model_states(states)
    return house


async def test_a_pinned_model_stays_until_it_is_unpinned(house: House) -> None:
    spare(house)
    for _ in range(2):
        pinned = await house.post("/v1/models/pin", model="org/spare").end()
        assert (pinned.status, pinned.json["pinned"]) == (200, True)
    assert house.line.told[-1].wanted == ["org/spare"]
    refused = await house.post("/v1/models/unload", model="org/spare").refusal()
    assert refused == (409, "model_in_use", "model")
    unpinned = await house.post("/v1/models/unpin", model="org/spare").end()
    assert "pinned" not in unpinned.json
    assert (await house.post("/v1/models/unload", model="org/spare").end()).status == 200
    assert house.line.told[-1].wanted == []


async def test_a_streamed_order_reports_each_change_until_it_is_carried_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.requests.status_streams.LOOK_S", 0.0)
    catalogue = spare(house).line.dispatcher.catalogue
    loading = house.post("/v1/models/load", model="org/spare", stream=True)
    await loading.holds(b'"state":"unloaded"')
    assert len(house.gateway.watchers) == 1
    running = ModelState(name="org/spare", stage="running")
    catalogue.on_model_states(ModelStates(models=[running], on_demand=True))
    house.line.hello("w2", "org/spare")
    house.line.say("w2", Loading(incarnation="w2", done=1, total=4))
    await loading.holds(b'"loading":{"done":1,"total":4}')
    house.line.serving("w2", "org/spare")
    await loading.end()
    assert loading.body.count(b"event: model\n") >= 3
    assert b'"state":"loaded"' in loading.body.split(b"\n\n")[-2]
    assert loading.headers["content-type"].startswith("text/event-stream")
    assert not house.gateway.watchers


async def test_a_streamed_order_is_kept_alive_and_ends_with_a_failure_or_at_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("broker.requests.status_streams.LOOK_S", 0.0)
    house = spare(House(keepalive_s=0.001))
    loading = house.post("/v1/models/load", model="org/spare", stream=True)
    await loading.holds(b": keep-alive")
    failed = ModelState(name="org/spare", stage="failed", failure="It is not on this machine.")
    house.line.dispatcher.catalogue.on_model_states(ModelStates(models=[failed], on_demand=True))
    await loading.end()
    assert b'"failure":"It is not on this machine."' in loading.body
    monkeypatch.setattr("broker.api.admin.model_routes.LOAD_ORDER_S_MAX", 0.0)
    bounded = await spare(house).post("/v1/models/load", model="org/spare", stream=True).end()
    assert bounded.body.count(b"event: model\n") == 1
