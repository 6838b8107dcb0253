"""Pagination of input items."""

from __future__ import annotations

import pytest

from broker.dialects.responses.listing import PAGE_ITEMS, page
from protocol.errors import RequestError

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


@pytest.mark.parametrize("limit", [7, 25])
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_page_after_page_is_all_of_them(limit: int, order: str) -> None:
    seen: list[str] = []
    query = {"limit": str(limit), "order": order}
    more = True
    while more:
        shown = page(ITEMS, query)
        seen += ids(shown)
        more = shown["has_more"]
        query["after"] = shown["last_id"]
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
