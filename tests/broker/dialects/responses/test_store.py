"""Stored responses: ownership by API key, maximum count and maximum total size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dialects.responses.store import (
    PIECE_BYTES,
    RESPONSE_BYTES,
    ResponseStore,
    StoredItems,
    StoredResponse,
)
from protocol.errors import RequestError

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


def test_oversized_response_is_dropped_without_evicting_other_owners() -> None:
    store = ResponseStore(8, 4096)
    store.put(BOB, "small", kept())
    store.put(ANN, "large", kept("x" * 5000))
    assert len(store) == 1
    assert _has(store, BOB, "small")


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
