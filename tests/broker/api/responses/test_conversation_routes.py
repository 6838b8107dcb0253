"""/v1/conversations, the responses that continue them, and POST /v1/responses/compact."""

from __future__ import annotations

from typing import Any

import pytest

from broker.api.responses.compaction import REQUEST
from broker.api.responses.content import unseal
from broker.dialects.foreign import SUMMARY
from protocol.conversation import unpack
from tests.broker.application import RESPONSES, House
from tests.broker.asgi import Exchange
from tests.factories import finished

CONVERSATIONS = "/v1/conversations"
ANN, BOB = "key-of-ann", "key-of-bob"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def answered(house: House, exchange: Exchange, text: str = "all aboard") -> Any:
    """Serve the newest request, and return its document."""
    return (await house.serve(exchange, text)).json


async def created(house: House, **body: Any) -> Any:
    return (await house.post(CONVERSATIONS, **body).end()).json


async def items_of(house: House, id: str, query: str = "order=asc") -> Any:
    return (await house.get(f"{CONVERSATIONS}/{id}/items?{query}").end()).json


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


async def test_a_response_continues_its_conversation_and_extends_it(house: House) -> None:
    made = await created(house, items=[user("1")], metadata={"topic": "rail"})
    assert (made["object"], made["metadata"]) == ("conversation", {"topic": "rail"})
    first = await answered(house, house.respond("2", conversation=made["id"]), "two")
    assert first["conversation"] == {"id": made["id"]}
    await answered(house, house.respond("3", conversation={"id": made["id"]}, store=False), "three")
    spoken = [message["content"] for message in unpack(house.requests()[-1]).messages]
    assert spoken == ["1\n\n2", "two", "3"]
    assert texts((await items_of(house, made["id"]))["data"]) == ["1", "2", "two", "3", "three"]


async def test_items_are_listed_in_pages_added_read_and_deleted_as_is_the_conversation(house: House) -> None:
    made = await created(house)
    path = f"{CONVERSATIONS}/{made['id']}/items"
    added = (await house.post(path, items=[user(str(number)) for number in range(5)]).end()).json
    assert texts(added["data"]) == ["0", "1", "2", "3", "4"]
    page = await items_of(house, made["id"], "limit=2")
    assert (texts(page["data"]), page["has_more"]) == (["4", "3"], True)
    after = await items_of(house, made["id"], f"limit=9&after={page['last_id']}")
    assert (texts(after["data"]), after["has_more"]) == (["2", "1", "0"], False)
    one = added["data"][2]
    assert (await house.get(f"{path}/{one['id']}").end()).json == one
    deleted = await house.get(f"{path}/{one['id']}", method="DELETE").end()
    assert deleted.json["id"] == made["id"]
    assert (await house.get(f"{path}/{one['id']}").end()).status == 404
    assert texts((await items_of(house, made["id"]))["data"]) == ["0", "1", "3", "4"]
    conversation = f"{CONVERSATIONS}/{made['id']}"
    await house.post(conversation, metadata={"b": "2"}).end()
    assert (await house.get(conversation).end()).json["metadata"] == {"b": "2"}
    deleted = (await house.get(conversation, method="DELETE").end()).json
    assert (deleted["object"], deleted["deleted"]) == ("conversation.deleted", True)
    assert await house.get(conversation).refusal() == (404, "conversation_not_found", None)


async def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(house: House) -> None:
    made = await created(house)
    exchange = house.respond("1", conversation=made["id"])
    id = await house.arrived()
    await house.get(f"{CONVERSATIONS}/{made['id']}", method="DELETE").end()
    house.begin(id, "late")
    house.line.say("w", finished("w", id, 1))
    assert (await exchange.end()).json["status"] == "completed"
    assert (await house.get(f"{CONVERSATIONS}/{made['id']}").end()).status == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [user("x")] * 21}, "items"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata[...]"),
    ],
)
async def test_invalid_bodies_name_the_parameter(house: House, body: dict[str, Any], param: str) -> None:
    assert await house.post(CONVERSATIONS, **body).refusal() == (400, "invalid_request", param)


async def test_unknown_conversations_and_two_histories_are_refused(house: House) -> None:
    refused = await house.respond("1", conversation="conv_none").refusal()
    assert refused == (404, "conversation_not_found", None)
    made = await created(house)
    refused = await house.respond("1", conversation=made["id"], previous_response_id="resp_x").refusal()
    assert refused == (400, "invalid_request", "conversation")
    for path in (f"{RESPONSES}/{made['id']}", f"{CONVERSATIONS}/resp_{'a' * 24}"):
        assert (await house.get(path).end()).status == 404
    refused = await house.respond("1", previous_response_id=made["id"]).refusal()
    assert refused == (400, "previous_response_not_found", "previous_response_id")


async def test_a_conversation_belongs_to_its_key() -> None:
    house = House(api_keys=(ANN, BOB))
    made = (await house.keyed(CONVERSATIONS, "k", ANN, items=[user("1")]).end()).json
    path = f"{CONVERSATIONS}/{made['id']}"
    assert (await house.get(path, x_api_key=ANN).end()).status == 200
    assert (await house.get(path, x_api_key=BOB).end()).status == 404


async def test_a_compacted_conversation_is_continued_from_its_summary(house: House) -> None:
    first = await answered(house, house.respond("Where is the key?"), "Under the mat.")
    exchange = house.post(f"{RESPONSES}/compact", previous_response_id=first["id"])
    compacted = await answered(house, exchange, "The key is under the mat.")
    asked = [message["content"] for message in unpack(house.requests()[-1]).messages]
    assert asked == ["Where is the key?", "Under the mat.", REQUEST]
    assert compacted["object"] == "response.compaction"
    message, item = compacted["output"]
    assert message["content"][0]["text"] == "Where is the key?"
    assert unseal(item["encrypted_content"]) == "The key is under the mat."
    assert compacted["usage"]["total_tokens"] > 0
    foreign = {"type": "compaction", "encrypted_content": "gAAAAABo"}
    await answered(house, house.respond([foreign, *compacted["output"], user("And now?")]))
    [message] = unpack(house.requests()[-1]).messages
    assert message["content"] == (f"Where is the key?\n\n{SUMMARY}\n\nThe key is under the mat.\n\nAnd now?")
    trigger, tools = {"type": "compaction_trigger"}, [{"type": "function", "name": "f"}]
    form = {"type": "configuration_update", "text": {"format": {"type": "json_object"}}}
    exchange = house.respond([form, trigger], previous_response_id=first["id"], tools=tools)
    second = await answered(house, exchange, "The key is gone.")
    sent = unpack(house.requests()[-1])
    assert ([message["content"] for message in sent.messages], sent.tools) == (asked, None)
    assert house.requests()[-1].form is None
    [item] = second["output"]
    assert (item["type"], unseal(item["encrypted_content"])) == ("compaction", "The key is gone.")
    await answered(house, house.respond("Really?", previous_response_id=second["id"]))
    [message] = unpack(house.requests()[-1]).messages
    assert message["content"] == f"Where is the key?\n\n{SUMMARY}\n\nThe key is gone.\n\nReally?"
    assert await house.post(f"{RESPONSES}/compact").refusal() == (400, "invalid_request", "input")
