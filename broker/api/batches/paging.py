"""Pagination of lists of objects by id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker.dialects.body import wrong

_DIGITS_MAX = 6


@dataclass(frozen=True, slots=True)
class Paging:
    """Names and bounds of an API's parameters. `before`: None if pages only go forward."""

    after: str
    before: str | None
    limit: int
    limit_max: int

    def page(self, items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
        """Return one page of `items`, which are in the order of the list. Raises `RequestError` naming the
        parameter."""
        ids = [item["id"] for item in items]
        first, last = 0, len(items)
        limit = self._limit(query)
        if self.after in query:
            first = 1 + _place(ids, self.after, query[self.after])
        if self.before is not None and self.before in query:
            last = _place(ids, self.before, query[self.before])
            first = max(first, last - limit)
        shown = items[first:last][:limit]
        # Backwards, there is more if a page before this one has anything.
        has_more = first > 0 if self.before in query else first + len(shown) < last
        return {
            "data": list(shown),
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": has_more,
        }

    def _limit(self, query: Mapping[str, str]) -> int:
        text = query.get("limit", str(self.limit))
        is_number = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
        if not (is_number and 1 <= int(text) <= self.limit_max):
            raise wrong("limit", f"must be between 1 and {self.limit_max}")
        return int(text)


def _place(ids: Sequence[str], name: str, id: str) -> int:
    try:
        return ids.index(id)
    except ValueError:
        raise wrong(name, f"is {id[:128]!r}, which is not in this list") from None
