"""`Idempotency-Key`: retries join the answer to the first request, in every dialect."""

from __future__ import annotations

import pytest

from broker.answers import answers
from tests.broker.application import BODIES, CHAT, MESSAGES, SAID, House, house_with_worker
from tests.broker.asgi import until
from tests.factories import events, failed, finished

ANN, BOB = "key-of-ann", "key-of-bob"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_same_bytes_and_is_computed_once(
    path: str, stream: bool, roomy: House
) -> None:
    body = BODIES[path] | {"stream": stream}
    first = roomy.keyed(path, "k", **body)
    id = await roomy.arrived()
    roomy.begin(id, "all ")
    if stream:
        await first.holds(b"all ")
    second = roomy.keyed(path, "k", **body)
    if stream:
        await second.holds(b"all ")
    first.leave()
    await first.end()
    roomy.line.say("w", events("w", id, "aboard", first=1), finished("w", id, 2))
    await second.end()
    third = await roomy.keyed(path, "k", **body).end()
    assert second.complete
    assert third.complete
    assert second.body == third.body
    assert b"aboard" in third.body
    assert second.headers["x-roundhouse-cache"] == third.headers["x-roundhouse-cache"]
    assert second.body.startswith(first.body)
    assert len(roomy.requests()) == 1
    assert len(roomy.line.dispatcher.flights) == 0
    assert roomy.gateway.answering == {}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_another_body_with_the_key_is_a_conflict_in_the_shape_of_the_dialect(
    path: str, roomy: House
) -> None:
    body = BODIES[path]
    roomy.keyed(path, "k", **body)
    await roomy.arrived()
    other = await roomy.keyed(path, "k", **body, temperature=0.5).end()
    assert other.status == 409
    assert other.headers["x-should-retry"] == "false"
    if path == MESSAGES:
        assert other.json["error"]["type"] == "invalid_request_error"
    else:
        assert other.error["code"] == "idempotency_key_reused"


async def test_keys_of_two_owners_are_apart() -> None:
    house = house_with_worker(api_keys=(ANN, BOB))
    for number, key in enumerate((ANN, BOB)):
        answer = await house.serve(house.keyed(CHAT, "k", key, **BODIES[CHAT]), f"for {number}")
        assert answer.json["choices"][0]["message"]["content"] == f"for {number}"


async def test_a_malformed_key_is_refused_by_name_and_leaves_nothing_behind(roomy: House) -> None:
    for key in ("", "k" * 256, "k\nk"):
        refused = await roomy.keyed(CHAT, key, **BODIES[CHAT]).refusal()
        assert refused == (400, "invalid_request", "Idempotency-Key")
    refused = await roomy.keyed(CHAT, "k", messages=SAID, temperature=9).refusal()
    assert refused == (400, "invalid_request", "temperature")
    assert len(roomy.gateway.answers) == 0


async def test_an_answer_that_failed_is_computed_again(roomy: House) -> None:
    first = roomy.keyed(CHAT, "k", **BODIES[CHAT])
    second = roomy.keyed(CHAT, "k", **BODIES[CHAT])
    id = await roomy.arrived()
    roomy.line.say("w", failed("w", id, "engine_error"))
    assert (await first.end()).status == (await second.end()).status == 500
    assert (await roomy.serve(roomy.keyed(CHAT, "k", **BODIES[CHAT]), "now")).status == 200


async def test_an_answer_whose_client_does_not_come_back_is_given_up_after_the_window() -> None:
    house = house_with_worker(reattach_window_s=0.001)
    first = house.keyed(CHAT, "k", **BODIES[CHAT], stream=True)
    id = await house.arrived()
    house.begin(id, "all ")
    await first.holds(b"all ")
    house.gateway.answers.sweep()
    assert len(house.line.dispatcher.flights) == 1
    first.leave()
    await first.end()
    await until(lambda: house.gateway.answers.sweep() or not len(house.line.dispatcher.flights))
    assert house.cancels() == [id]
    assert house.gateway.answers.counts["abandoned"] == 1


async def test_a_reader_that_does_not_read_holds_nobody_up(roomy: House) -> None:
    slow, quick = (roomy.keyed(CHAT, "k", **BODIES[CHAT], stream=True) for _ in range(2))
    slow.stop_reading()
    id = await roomy.arrived()
    roomy.begin(id, *("x" * 10 for _ in range(3000)))
    roomy.line.say("w", finished("w", id, 3000))
    assert (await quick.end()).body.endswith(b"data: [DONE]\n\n")
    slow.read_on()
    assert (await slow.end()).body == quick.body


async def test_beyond_its_memory_the_largest_answer_fails_and_says_so(
    roomy: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roomy.gateway.answers, "_bytes_max", 2000)
    small, large = (roomy.keyed(CHAT, key, **BODIES[CHAT], stream=True) for key in "ab")
    await roomy.arrived(2)
    one, other = (request.id for request in roomy.requests())
    roomy.begin(one, "x")
    roomy.begin(other, "y" * 4000)
    await large.holds(b"yyyy")
    await small.holds(b"x")
    roomy.gateway.answers.sweep()
    assert answers.FULL.encode() in (await large.end()).body
    assert large.body.endswith(b"data: [DONE]\n\n")
    assert roomy.cancels() == [other]
    roomy.gateway.answers.sweep()
    roomy.line.say("w", finished("w", one, 1))
    assert (await small.end()).body.endswith(b"data: [DONE]\n\n")


async def test_a_stream_that_waits_gets_keepalives_which_are_not_part_of_the_answer() -> None:
    house = house_with_worker(keepalive_s=0.01)
    first = house.keyed(CHAT, "k", **BODIES[CHAT], stream=True)
    id = await house.arrived()
    house.begin(id, "all ")
    await first.holds(b": keep-alive")
    house.line.say("w", finished("w", id, 1))
    await first.end()
    second = await house.keyed(CHAT, "k", **BODIES[CHAT], stream=True).end()
    assert second.body.count(b": keep-alive") < first.body.count(b": keep-alive")
    assert first.body.replace(b": keep-alive\n\n", b"") == second.body.replace(b": keep-alive\n\n", b"")
