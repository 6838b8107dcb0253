"""Stored responses: bounds of the store, the history that requests refer to, and pages of items."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dialects.responses.body import read
from broker.dialects.responses.history import recall, response_id
from broker.dialects.responses.items import Placed, listed
from broker.dialects.responses.listing import PAGE_ITEMS, page
from broker.dialects.responses.store import (
    PIECE_BYTES,
    RESPONSE_BYTES,
    ResponseStore,
    StoredItems,
    StoredResponse,
)
from protocol.errors import Code, RequestError

ANN, BOB = b"ann", b"bob"


def item(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def kept(text: str = "x", before: tuple[StoredItems, ...] = ()) -> StoredResponse:
    """Stored response: one turn of a conversation."""
    return StoredResponse.of(
        {"id": text, "output": [item(f"out {text}")]}, (*before, StoredItems.of([item(f"in {text}")]))
    )


def test_the_oldest_goes_first_and_who_goes_on_from_it_keeps_all() -> None:
    store = ResponseStore(2, 2**20)
    first = kept("1")
    for number, one in enumerate([first, kept("2", first.pieces), kept("3")], 1):
        store.put(ANN, f"r{number}", one)
    with pytest.raises(RequestError):
        store.get(ANN, "r1")
    assert store.get(ANN, "r2").document() == {"id": "2", "output": [item("out 2")]}
    assert store.get(ANN, "r2").input() == [item("in 1"), item("out 1"), item("in 2")]


@pytest.mark.parametrize(("count_max", "bytes_max"), [(6, 2**20), (1000, 12_000)])
def test_eviction_is_fair_between_api_keys(count_max: int, bytes_max: int) -> None:
    store = ResponseStore(count_max, bytes_max)
    store.put(BOB, "old", kept())
    for number in range(40):
        store.put(ANN, f"r{number}", kept("x" * 300))
    assert store.get(BOB, "old")
    assert store.get(ANN, "r39")
    for number in range(40):
        store.put(BOB, f"r{number}", kept("x" * 300))
    mine = [owner for owner in (ANN, BOB) for number in range(40) if _has(store, owner, f"r{number}")]
    assert abs(mine.count(ANN) - mine.count(BOB)) <= 1
    assert _has(store, ANN, "r39")
    assert _has(store, BOB, "r39")
    assert not _has(store, BOB, "old")
    store.put(ANN, "large", kept("x" * 2**20))
    others = sum(_has(store, BOB, f"r{number}") for number in range(40))
    assert others == mine.count(BOB), "one that is too large evicts none of another key"


def _has(store: ResponseStore, owner: bytes, id: str) -> bool:
    try:
        return bool(store.get(owner, id))
    except RequestError:
        return False


acts = st.tuples(st.sampled_from(["new", "go on", "delete"]), st.integers(0, 30), st.integers(1, 800))


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(1500, 9000), st.lists(acts, max_size=30))
def test_it_keeps_to_its_bounds_and_counts_each_piece_once(
    count_max: int, bytes_max: int, script: list[tuple[str, int, int]]
) -> None:
    store = ResponseStore(count_max, bytes_max)
    there: dict[str, StoredResponse] = {}
    for number, (act, which, size) in enumerate(script):
        name = list(there)[which % len(there)] if there else ""
        if act == "delete" and there:
            store.delete(ANN, name)
            del there[name]
        else:
            before = there[name].pieces if act == "go on" and there else ()
            there[f"r{number}"] = kept(str(number) + "x" * size, before)
            store.put(ANN, f"r{number}", there[f"r{number}"])
        while len(there) > len(store):
            del there[next(iter(there))]  # the oldest
        assert all(store.get(ANN, name) is one for name, one in there.items())
        assert len(store) <= count_max
        assert store.bytes == _bytes(there) <= bytes_max


def _bytes(there: dict[str, StoredResponse]) -> int:
    pieces = {id(piece): len(piece.encoded) for one in there.values() for piece in one.pieces}
    own = (RESPONSE_BYTES + len(one.head) + PIECE_BYTES * len(one.pieces) for one in there.values())
    return sum(pieces.values()) + sum(own)


FIRST, SECOND = "a" * 24, "b" * 24
BYTES_MAX = 2**20


def said(stem: str, text: str) -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{stem}_0", "role": "assistant", "content": text}


@pytest.fixture
def store() -> ResponseStore:
    """Response store with two turns of one conversation."""
    store = ResponseStore(8, BYTES_MAX)
    before: tuple[StoredItems, ...] = ()
    for stem, text in ((FIRST, "one"), (SECOND, "two")):
        input = listed([{"role": "user", "content": f"{text}?"}], stem)
        kept = StoredResponse.of({"output": [said(stem, text)]}, (*before, StoredItems.of(input)))
        store.put(ANN, response_id(stem), kept)
        before = kept.pieces
    return store


def placed(store: ResponseStore, *, bytes_max: int = BYTES_MAX, **fields: Any) -> list[Placed]:
    body = read(json.dumps(fields).encode())
    return recall(body, store, ANN, bytes_max=bytes_max).placed()


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
