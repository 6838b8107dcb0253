"""Routes about adapters, ours and vLLM's."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.messages import AdaptersChanged, LoadAdapter
from protocol.types import AdapterInfo
from tests.broker.application import House
from tests.broker.asgi import until

INFO = AdapterInfo(name="sql", digest="d", rank=4, bytes=100, folder="/srv/secret/sql")


def loads(house: House) -> list[LoadAdapter]:
    return [message for _, message in house.line.sent if isinstance(message, LoadAdapter)]


def reply(house: House, name: str = "sql", error: str = "", *adapters: AdapterInfo) -> None:
    told = AdaptersChanged(incarnation="w", name=name, error=error, adapters=list(adapters))
    house.line.say("w", told)


async def test_an_adapter_is_loaded_listed_asked_for_and_removed(house: House) -> None:
    added = house.post("/v1/adapters", name="sql", folder="/srv/secret/sql")
    await until(lambda: loads(house))
    assert not added.task.done()
    reply(house, "sql", "", INFO)
    shown = (await added.end()).json
    assert (shown["id"], shown["rank"]) == ("org/model:sql", 4)
    listed = await house.get("/v1/adapters").end()
    assert listed.json["data"] == [shown]
    models = await house.get("/v1/models").end()
    assert [model["id"] for model in models.json["data"]] == ["org/model", "org/model:sql"]
    assert b"secret" not in listed.body + models.body
    house.chat(model="org/model:sql")
    await house.arrived()
    assert house.requests()[0].adapter == "sql"
    metrics = (await house.get("/metrics").end()).body.decode()
    assert 'roundhouse_adapters{model="org/model"} 1.0' in metrics
    gone = await house.get("/v1/adapters/sql", "DELETE").end()
    assert gone.json["requests"] == 1
    status = (await house.get("/v1/status").end()).json
    [model], [asked] = status["models"], status["requests"]
    assert model["adapters"] == [{"name": "sql", "rank": 4, "bytes": 100, "leaving": True}]
    assert asked["adapter"] == "sql"
    assert (await house.chat(model="org/model:sql").end()).status == 404
    assert (await house.post("/v1/unload_lora_adapter", lora_name="none").end()).status == 404
    house.chat(model="org/model:latest")
    await house.arrived(2)
    assert [asked.adapter for asked in house.requests()] == ["sql", ""]


async def test_a_broken_adapter_is_one_sentence(house: House) -> None:
    added = house.post("/v1/load_lora_adapter", lora_name="sql", lora_path="/srv/sql")
    await until(lambda: loads(house))
    reply(house, "sql", "it has no adapter_config.json")
    refused = await added.end()
    assert (refused.status, refused.error["param"]) == (400, "lora_path")
    assert refused.error["message"] == ("The adapter `sql` cannot be served: it has no adapter_config.json.")
    assert (await house.get("/v1/adapters").end()).json["data"] == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/adapters", {"name": "sql"}, "folder"),
        ("/v1/adapters", {"name": "a:b", "folder": "/a"}, "name"),
        ("/v1/adapters", {"name": "sql", "folder": "/a", "model": "none"}, "model"),
    ],
)
async def test_bad_input_names_the_parameter(
    house: House, path: str, body: dict[str, Any], param: str
) -> None:
    status, _, named = await house.post(path, **body).refusal()
    assert (status in (400, 404), named) == (True, param)
    assert loads(house) == []
