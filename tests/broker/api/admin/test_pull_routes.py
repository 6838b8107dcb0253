"""Downloads over HTTP, with a supervisor that the test plays."""

from __future__ import annotations

import pytest

from protocol.supervisor_messages import ModelStates, PullStage, PullState
from tests.broker.application import House

PULL = "/v1/models/pull"


def report(house: House, *states: PullState) -> None:
    house.line.dispatcher.catalogue.on_model_states(ModelStates(models=[], pulls=[*states]))


def state(id: str, stage: PullStage = "running", failure: str = "", done: int = 0) -> PullState:
    return PullState(id=id, model="org/a", stage=stage, failure=failure, done_bytes=done, total_bytes=4)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.requests.status_streams.LOOK_S", 0.0)


async def test_a_download_is_ordered_reported_as_events_and_listed() -> None:
    house = House(keepalive_s=0.001)
    nowhere = await house.post(PULL, model="org/a").end()
    assert (nowhere.status, "roundhouse pull" in nowhere.error["message"]) == (400, True)
    report(house)
    assert await house.post(PULL, model="../a").refusal() == (400, "invalid_request", "model")
    answer = house.post(PULL, model="org/a", stream=True)
    await answer.holds(b'"status":"running"')
    await answer.holds(b": keep-alive")
    [ordered] = house.line.told[-1].pulls or []
    assert ordered.model == "org/a"
    report(house, state(ordered.id, done=1))
    await answer.holds(b'"done_bytes":1,"total_bytes":4')
    joined = (await house.post(PULL, model="org/a").end()).json
    assert (joined["id"], joined["object"]) == (ordered.id, "model.pull")
    report(house, state(ordered.id, "done", done=4))
    await answer.end()
    assert b'"status":"done"' in answer.body.split(b"\n\n")[-2]
    assert house.line.told[-1].pulls == []
    [listed] = (await house.get(PULL).end()).json["data"]
    assert listed == (await house.get(f"{PULL}/{ordered.id}").end()).json
    assert not house.gateway.watchers


async def test_a_failed_download_says_why_and_a_cancelled_one_is_withdrawn(house: House) -> None:
    report(house)
    id = (await house.post(PULL, model="org/a").end()).json["id"]
    report(house, state(id, "failed", "org/a: the hub cannot be reached."))
    failed = (await house.get(f"{PULL}/{id}").end()).json
    assert (failed["status"], failed["failure"]) == ("failed", "org/a: the hub cannot be reached.")
    again = (await house.post(PULL, model="org/a").end()).json["id"]
    for _ in range(2):
        cancelled = await house.post(f"{PULL}/{again}/cancel").end()
        assert (cancelled.status, cancelled.json["status"]) == (200, "failed")
    assert house.line.told[-1].pulls == []
    assert await house.post(f"{PULL}/pull_0/cancel").refusal() == (404, "route_not_found", "id")
