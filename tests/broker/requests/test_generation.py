"""Requests with several choices, and requests that are refused or fail."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest
from msgspec.structs import replace

from tests.broker.application import BODIES, CHAT, TEXT, House, house_with_worker
from tests.broker.asgi import Exchange
from tests.broker.dispatcher_line import ready
from tests.factories import accepted, events, failed, finished, reused


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_fingerprint_is_stable_and_changes_with_the_model(path: str, house: House) -> None:
    """It is the same in every chunk and document, until a worker with other weights takes the name."""

    async def fingerprints(*, stream: bool) -> set[str]:
        exchange = house.post(path, stream=stream, **BODIES[path])
        body = (await house.serve(exchange, "x")).body.decode()
        return set(re.findall('"system_fingerprint":"(fp_[0-9a-f]{10})"', body))

    [before] = await fingerprints(stream=True) | await fingerprints(stream=False)
    house.line.say("w", replace(ready("w"), identity="other weights"))
    [after] = await fingerprints(stream=False)
    assert after != before


# --- several choices ---------------------------------------------------------------------------------


async def test_n_answers_are_n_requests_alike_but_for_their_seeds(roomy: House) -> None:
    answer = roomy.chat(n=3, seed=7, temperature=0)
    await roomy.arrived(3)
    first, *others = roomy.requests()
    assert first.sampling.seed == 7
    assert all(other.messages == first.messages for other in others)
    assert len({request.sampling.seed for request in roomy.requests()}) == 3
    for number, request in reversed([*enumerate(roomy.requests())]):
        id = request.id
        roomy.line.say("w", accepted("w", id), events("w", id, f"{number}", "!"), finished("w", id, 2))
    document = (await answer.end()).json
    assert [c["message"]["content"] for c in document["choices"]] == ["0!", "1!", "2!"]
    assert [c["index"] for c in document["choices"]] == [0, 1, 2]
    assert (document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) == (3, 6)
    assert document["id"] == first.id
    assert roomy.cancels() == []
    assert len(roomy.line.dispatcher.flights) == 0


async def test_operators_limit_answers_to_requests_without_max_tokens() -> None:
    house = house_with_worker(waiting_max=8, max_tokens_default=512)
    for asked in ({}, {"max_tokens": 2000}):
        await house.serve(house.chat(**asked), "x")
    assert [request.max_tokens for request in house.requests()] == [512, 2000]


async def test_without_room_for_all_answers_none_is_begun(roomy: House) -> None:
    assigned = [roomy.chat(stream=True) for _ in range(3)]
    await roomy.arrived(3)
    assert await roomy.chat(n=3).refusal() == (503, "text_generation_busy", None)
    assert len(roomy.requests()) == 3
    assert await roomy.chat(n=6).refusal() == (400, "invalid_request", "n")
    for exchange in assigned:
        exchange.leave()
        await exchange.end()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_the_worker_refuses_is_one_400_and_the_copies_are_cancelled(
    stream: bool, roomy: House
) -> None:
    answer = roomy.chat(n=3, stream=stream)
    await roomy.arrived(3)
    a, b, c = [request.id for request in roomy.requests()]
    roomy.line.say("w", accepted("w", a), failed("w", b, "context_length_exceeded"))
    assert await answer.refusal() == (400, "context_length_exceeded", None)
    assert roomy.cancels() == [a, c]


async def test_one_answer_that_fails_on_the_way_ends_the_stream_and_cancels_the_others(roomy: House) -> None:
    answer = roomy.chat(n=3, stream=True)
    await roomy.arrived(3)
    a, b, c = [request.id for request in roomy.requests()]
    roomy.line.say("w", *(accepted("w", id) for id in (a, b, c)), events("w", a, "x"), finished("w", a))
    await answer.holds(b'"x"')
    roomy.line.say("w", events("w", b, "y"), failed("w", b))
    await answer.end()
    assert answer.body.count(b'"error"') == answer.body.count(b"[DONE]") == 1
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert roomy.cancels() == [c]
    assert len(roomy.line.dispatcher.flights) == 0


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["key", "all"])
@pytest.mark.parametrize("path", BODIES)
async def test_the_salt_of_a_prompt_is_that_of_its_key_and_its_client(path: str, sharing: str) -> None:
    house = house_with_worker(rows=8, api_keys=("ann", "bob"), prefix_sharing=sharing, waiting_max=8)
    exchanges = []
    for number, (key, salt) in enumerate(product(("ann", "bob"), (None, "tenant"))):
        body = json.dumps({**BODIES[path], "cache_salt": salt}).encode()
        exchanges.append(Exchange(house.app, "POST", path, body, headers=[(b"x-api-key", key.encode())]))
        await house.arrived(number + 1)
    salts = [request.cache_salt for request in house.requests()]
    if sharing == "all":
        assert salts == ["", "tenant"] * 2
    else:
        keys = [house.gateway.api_keys_store.find(key) for key in (b"ann", b"bob")]
        assert salts == [f"{key.prefix_namespace}/{salt}" for key in keys if key for salt in ("", "tenant")]
    for exchange in exchanges:
        exchange.leave()
        await exchange.end()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [("engine_error", 500, False), ("shutting_down", 503, True), ("a_later_code", 500, False)],
)
async def test_failure_before_the_first_token_has_its_http_status(
    stream: bool, code: str, status: int, retry: bool, house: House
) -> None:
    answer = house.chat(stream=stream)
    house.line.say("w", failed("w", await house.arrived(), code))
    await answer.end()
    assert answer.status == status
    assert answer.headers.get("x-should-retry") == (None if retry else "false")
    assert ("retry-after" in answer.headers) == retry
    assert answer.error["type"] == "server_error"
    assert len(house.line.dispatcher.flights) == 0


async def test_a_gateway_whose_time_to_drain_is_over_says_so_to_newcomers_and_to_those_aboard(
    house: House,
) -> None:
    answer = house.chat(stream=True)
    id = await house.arrived()
    house.line.say("w", accepted("w", id), reused("w", id))
    await answer.started()
    house.line.dispatcher.stop()
    house.line.dispatcher.fail_all()
    await answer.end()
    assert await house.chat().refusal() == (503, "shutting_down", None)
    assert b"shutting_down" in answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert house.cancels() == [id]
