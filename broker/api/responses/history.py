"""Conversation of a request: the stored one that it continues, and its own items with references resolved."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from broker.api.responses.body import Body
from broker.api.responses.conversations import PREFIX, ConversationStore
from broker.api.responses.items import Item, Placed, kind_of
from broker.api.responses.store import ResponseStore, StoredItems, StoredResponse, unknown
from broker.dialects.body import encode
from protocol.errors import Code, RequestError

_BEFORE = "before"
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})_i?[0-9]+")


def response_id(stem: str) -> str:
    """Return the id of a response. The ids of its items contain the same stem."""
    return f"resp_{stem}"


@dataclass(frozen=True, slots=True)
class ConversationHistory:
    """`before`: the stored conversation that the request continues, named by `parameter`. `items`: the
    request's own."""

    before: tuple[StoredItems, ...]
    items: Sequence[Item]
    is_text: bool = False
    parameter: str = "previous_response_id"

    @property
    def bytes_before(self) -> int:
        """Size of the stored conversation."""
        return sum(len(piece.encoded) for piece in self.before)

    def placed(self) -> list[Placed]:
        """Return all items in order, each with its place in the body."""
        earlier: list[Placed] = [(self.parameter, item) for p in self.before for item in p.items()]
        if self.is_text:
            return [*earlier, *(("input", item) for item in self.items)]
        return [*earlier, *((f"input[{index}]", item) for index, item in enumerate(self.items))]


async def recall(body: Body, store: ResponseStore, owner: str, *, bytes_max: int) -> ConversationHistory:
    """Load the conversation of a request. `bytes_max`: limit for everything that is not in the body.

    Raises `RequestError` if something is not stored, belongs to another key, or exceeds the limit.
    """
    before: tuple[StoredItems, ...] = ()
    used, parameter = 0, "conversation" if body.conversation else "previous_response_id"
    if (previous := await _previous(body, store, owner)) is not None:
        before, used = previous.pieces, previous.conversation_bytes
        _check_size(used, bytes_max)
    if isinstance(body.input, str):
        text = [{"role": "user", "content": body.input}]
        return ConversationHistory(before, text, is_text=True, parameter=parameter)
    lookup = _ItemLookup(store, owner, before)
    items = [item async for item in _resolved(body.input, lookup, used, bytes_max)]
    return ConversationHistory(before, items, parameter=parameter)


async def _previous(body: Body, store: ResponseStore, owner: str) -> StoredResponse | None:
    if body.conversation_id is not None:
        return await ConversationStore(store).get(owner, body.conversation_id)
    if not body.previous_response_id:
        return None
    try:
        if body.previous_response_id.startswith(PREFIX):
            raise unknown(body.previous_response_id)
        return await store.get(owner, body.previous_response_id)
    except RequestError as error:
        if error.code is not Code.RESPONSE_NOT_FOUND:
            raise
        code, param = Code.PREVIOUS_RESPONSE_NOT_FOUND, "previous_response_id"
        raise RequestError(code, f"Previous response: {error.message}", param=param) from None


async def _resolved(
    items: Sequence[dict[str, Any]], lookup: _ItemLookup, used: int, bytes_max: int
) -> AsyncIterator[dict[str, Any]]:
    for index, item in enumerate(items):
        if kind_of(item) != "item_reference":
            yield item
            continue
        found = await lookup.item(str(item.get("id")), f"input[{index}].id")
        used += len(encode(found))
        _check_size(used, bytes_max)
        yield found


class _ItemLookup:
    """Item lookup for one request: each response is decoded once."""

    def __init__(self, store: ResponseStore, owner: str, before: Sequence[StoredItems]) -> None:
        """`before`: the conversation of the request, whose items may have ids of other clients."""
        self._store = store
        self._owner = owner
        self._before = before
        self._known: dict[str, dict[str, dict[str, Any]]] = {}

    async def item(self, id: str, param: str) -> dict[str, Any]:
        stem = of[1] if (of := _ITEM_ID.fullmatch(id)) else ""
        if stem not in self._known:
            self._known[stem] = await self._items(stem)
        found = self._known[stem].get(id) or self._earlier_items().get(id)
        if found is None:
            message = f"Item with id {id[:128]!r} not found: its response is not stored, or no longer."
            raise RequestError(Code.RESPONSE_NOT_FOUND, message, param=param)
        return found

    def _earlier_items(self) -> dict[str, dict[str, Any]]:
        if _BEFORE not in self._known:
            items = (item for piece in self._before for item in piece.items())
            self._known[_BEFORE] = {str(item.get("id")): item for item in items}
        return self._known[_BEFORE]

    async def _items(self, stem: str) -> dict[str, dict[str, Any]]:
        try:
            pieces = (await self._store.get(self._owner, response_id(stem))).pieces[-2:]
        except RequestError as error:
            if error.code is not Code.RESPONSE_NOT_FOUND:
                raise
            return {}
        return {str(item.get("id")): item for piece in pieces for item in piece.items()}


def _check_size(used: int, bytes_max: int) -> None:
    if used > bytes_max:
        message = f"The stored conversation and items have {used} bytes; at most {bytes_max} are allowed."
        raise RequestError(Code.REQUEST_TOO_LARGE, message)
