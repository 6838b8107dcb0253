"""History of a request: an earlier response, and items referenced by id."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.dialects.responses.body import read
from broker.dialects.responses.history import recall, response_id
from broker.dialects.responses.items import Placed, listed
from broker.dialects.responses.store import ResponseStore, StoredItems, StoredResponse
from protocol.errors import Code, RequestError

OWNER = b"ann"
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
        store.put(OWNER, response_id(stem), kept)
        before = kept.pieces
    return store


def placed(
    store: ResponseStore, *, owner: bytes = OWNER, bytes_max: int = BYTES_MAX, **fields: Any
) -> list[Placed]:
    body = read(json.dumps(fields).encode())
    return recall(body, store, owner, bytes_max=bytes_max).placed()


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
