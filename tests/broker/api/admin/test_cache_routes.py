"""Prefix cache routes for operators: status and clearing."""

from __future__ import annotations

import pytest

from broker.api.admin import cache_routes as cache
from protocol.messages import ClearCache
from protocol.types import PrefixStatus
from tests.broker.application import House, house_with_worker
from tests.broker.asgi import until
from tests.factories import cleared

ANN, BOB = "key-of-ann", "key-of-bob"


def orders(house: House) -> dict[str, ClearCache]:
    """Return the cache-clear order sent to each worker."""
    return {to: message for to, message in house.line.sent if isinstance(message, ClearCache)}


async def test_a_cache_is_shown_by_model_and_cleared_when_every_worker_has_said_so(house: House) -> None:
    house.line.beat("w", prefix=PrefixStatus(ram_bytes=5, lookups=2, hits=1))
    [cache] = (await house.get("/v1/cache").end()).json["data"]
    assert (cache["model"], cache["ram_bytes"], cache["hit_rate"]) == ("org/model", 5, 0.5)
    house.line.serving("w2", "org/model")
    house.line.serving("w3", "another")
    answer = house.get("/v1/cache", "DELETE")
    await until(lambda: orders(house))
    for number, worker in enumerate(["w3", "w", "w2"]):
        assert not answer.task.done()
        house.line.say(worker, cleared(worker, orders(house)[worker].id, 10 + number, 1))
    assert (await answer.end()).json == {
        "object": "list",
        "data": [
            {"model": "another", "ram_bytes": 10, "disk_bytes": 1},
            {"model": "org/model", "ram_bytes": 23, "disk_bytes": 2},
        ],
    }
    assert await house.get("/v1/cache?model=none", "DELETE").refusal() == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("keys", "sharing", "is_own"),
    [((ANN, BOB), "key", True), ((ANN, BOB), "all", False), ((ANN,), "key", False)],
    ids=["own", "shared", "only one key"],
)
async def test_a_key_clears_its_own_prefixes_where_there_are_others(
    keys: tuple[str, ...], sharing: str, is_own: bool
) -> None:
    house = house_with_worker(api_keys=keys, prefix_sharing=sharing)
    key = house.gateway.api_keys_store.find(ANN.encode())
    assert key is not None
    answer = house.get("/v1/cache", "DELETE", x_api_key=ANN)
    await until(lambda: orders(house))
    [order] = orders(house).values()
    assert order.namespace == (key.prefix_namespace if is_own else "")
    house.line.say("w", cleared("w", order.id))
    assert (await answer.end()).status == 200


@pytest.mark.parametrize(
    ("how", "status_code", "code"),
    [
        ("silence", 504, "deadline_exceeded"), ("death", 503, "worker_unavailable"),
        ("absence", 503, "worker_unavailable"),
    ],
)  # fmt: skip
async def test_a_cache_that_cannot_be_cleared_is_an_error_object(
    how: str, status_code: int, code: str, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "silence":
        monkeypatch.setattr(cache, "CLEAR_WAIT_S_MAX", 0.01)
    if how == "absence":
        house.line.dispatcher.lost("w")
    answer = house.get("/v1/cache", "DELETE")
    if how == "death":
        await until(lambda: orders(house))
        house.line.dispatcher.lost("w")
    assert await answer.refusal() == (status_code, code, None)
