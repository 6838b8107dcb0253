"""Pagination of the input items of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker.dialects.body import wrong

PAGE_ITEMS, PAGE_ITEMS_MAX = 20, 100


def page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page. `items`: all, oldest first. `query`: OpenAI's `order`, `after`, `before`, `limit`.

    Raises `RequestError` naming an invalid parameter.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise wrong("order", "must be 'asc' or 'desc'")
    limit = _limit(query.get("limit", str(PAGE_ITEMS)))
    ordered = list(items if order == "asc" else reversed(items))
    first = 1 + _index(ordered, "after", query["after"]) if "after" in query else 0
    last = _index(ordered, "before", query["before"]) if "before" in query else len(ordered)
    shown = ordered[first:last][:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": first + len(shown) < last,
    }


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= PAGE_ITEMS_MAX):
        raise wrong("limit", f"must be between 1 and {PAGE_ITEMS_MAX}")
    return int(text)


def _index(items: Sequence[dict[str, Any]], name: str, id: str) -> int:
    for index, item in enumerate(items):
        if item["id"] == id:
            return index
    raise wrong(name, f"is {id[:128]!r}, which is not an item of this response")
