"""Stored responses: the history that requests refer to, and pages of items."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.api.responses.body import read as read_body
from broker.api.responses.conversations import PAGE_ITEMS, page
from broker.api.responses.history import recall, response_id
from broker.api.responses.items import Placed, listed
from broker.api.responses.store import ResponseStore, StoredItems, StoredResponse
from broker.journal.file import Name, StoredEntry
from broker.journal.journal import Journal
from protocol.errors import Code, RequestError
from tests.broker.api.responses.stored_responses import response_store, result_of

ANN, BOB = "ann", "bob"


def item(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def kept(text: str = "x", before: tuple[StoredItems, ...] = ()) -> StoredResponse:
    """Stored response: one turn of a conversation."""
    return StoredResponse.of(
        {"id": text, "output": [item(f"out {text}")]}, (*before, StoredItems.of([item(f"in {text}")]))
    )


def test_who_goes_on_from_a_response_that_is_gone_keeps_all_of_the_conversation() -> None:
    store = response_store()
    first = kept("1")
    store.put(ANN, "r1", first)
    store.put(ANN, "r2", kept("2", first.pieces))
    result_of(store.delete(ANN, "r1"))
    with pytest.raises(RequestError):
        result_of(store.get(ANN, "r1"))
    with pytest.raises(RequestError):
        result_of(store.get(BOB, "r2"))
    second = result_of(store.get(ANN, "r2"))
    assert second.document() == {"id": "2", "output": [item("out 2")]}
    assert second.input() == [item("in 1"), item("out 1"), item("in 2")]


def test_a_disk_that_cannot_be_read_is_no_response_that_is_not_there() -> None:
    async def read(name: Name) -> StoredEntry | None:
        raise OSError("disk I/O error")

    store = ResponseStore(Journal(None, 0), read, keeps=True)
    body = read_body(json.dumps({"input": "x", "previous_response_id": "resp_1"}).encode())
    for work in (store.get(ANN, "resp_1"), recall(body, store, ANN, bytes_max=BYTES_MAX)):
        with pytest.raises(RequestError) as caught:
            result_of(work)
        assert caught.value.code is Code.STORAGE_FAILED


FIRST, SECOND = "a" * 24, "b" * 24
BYTES_MAX = 2**20


def said(stem: str, text: str) -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{stem}_0", "role": "assistant", "content": text}


@pytest.fixture
def store() -> ResponseStore:
    """Response store with two turns of one conversation."""
    store = response_store()
    before: tuple[StoredItems, ...] = ()
    for stem, text in ((FIRST, "one"), (SECOND, "two")):
        input = listed([{"role": "user", "content": f"{text}?"}], stem)
        kept = StoredResponse.of({"output": [said(stem, text)]}, (*before, StoredItems.of(input)))
        store.put(ANN, response_id(stem), kept)
        before = kept.pieces
    return store


def placed(store: ResponseStore, *, bytes_max: int = BYTES_MAX, **fields: Any) -> list[Placed]:
    body = read_body(json.dumps(fields).encode())
    return result_of(recall(body, store, ANN, bytes_max=bytes_max)).placed()


def test_previous_responses_precede_new_input_and_items_are_named_by_their_ids(store: ResponseStore) -> None:
    items = placed(store, input="three?", previous_response_id=response_id(SECOND))
    assert [place for place, _ in items] == ["previous_response_id"] * 4 + ["input"]
    assert [item["role"] for _, item in items] == ["user", "assistant"] * 2 + ["user"]
    assert items[3][1] == said(SECOND, "two")
    [(_, first), second] = placed(
        store, input=[{"type": "item_reference", "id": f"msg_{FIRST}_i0"}, {"id": f"msg_{SECOND}_0"}]
    )
    assert first["content"] == [{"type": "input_text", "text": "one?"}]
    assert second == ("input[1]", said(SECOND, "two"))


@pytest.mark.parametrize("id", [f"msg_{FIRST}_9", f"msg_{'c' * 24}_0", "msg_1", f"resp_{FIRST}"])
def test_an_item_that_is_not_kept_is_not_found(store: ResponseStore, id: str) -> None:
    with pytest.raises(RequestError) as caught:
        placed(store, input=[{"role": "user", "content": "x"}, {"type": "item_reference", "id": id}])
    assert (caught.value.code, caught.value.param) == (Code.RESPONSE_NOT_FOUND, "input[1].id")


def test_recalled_history_size_is_limited(store: ResponseStore) -> None:
    reference = {"type": "item_reference", "id": f"msg_{FIRST}_0"}
    assert len(placed(store, input=[reference] * 4, bytes_max=500)) == 4
    for fields in ({"input": [reference] * 40}, {"input": "x", "previous_response_id": response_id(SECOND)}):
        with pytest.raises(RequestError) as caught:
            placed(store, bytes_max=200, **fields)
        assert caught.value.code is Code.REQUEST_TOO_LARGE


ITEMS = [{"id": f"i{n}", "type": "message"} for n in range(25)]


def ids(document: dict[str, list[dict[str, str]]]) -> list[str]:
    return [item["id"] for item in document["data"]]


def test_the_newest_come_first_unless_asked_otherwise() -> None:
    shown = page(ITEMS, {})
    assert ids(shown) == [f"i{n}" for n in range(24, 24 - PAGE_ITEMS, -1)]
    assert (shown["first_id"], shown["last_id"], shown["has_more"]) == ("i24", "i5", True)
    assert ids(page(ITEMS, {"order": "asc", "limit": "2"})) == ["i0", "i1"]
    between = page(ITEMS, {"order": "asc", "after": "i1", "before": "i4"})
    assert (ids(between), between["has_more"]) == (["i2", "i3"], False)
    empty = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert page([], {}) == empty


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_page_after_page_is_all_of_them(order: str) -> None:
    seen: list[str] = []
    query, more = {"limit": "7", "order": order}, True
    while more:
        shown = page(ITEMS, query)
        seen += ids(shown)
        query["after"], more = shown["last_id"], shown["has_more"]
    wanted = [item["id"] for item in ITEMS]
    assert seen == (wanted if order == "asc" else wanted[::-1])


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"order": "up"}, "order"),
        ({"limit": "0"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"limit": "²"}, "limit"),
        ({"after": "nobody"}, "after"),
    ],
)
def test_invalid_query_error_names_the_param(query: dict[str, str], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        page(ITEMS, query)
    assert caught.value.param == param
