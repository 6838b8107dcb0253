"""Conversations of OpenAI's API: items under an id of their own, which responses continue and extend.

A conversation is stored as a response is, without output: its document, and its items in pieces that it
shares with the responses that made them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from broker.api.responses.body import RawItem
from broker.api.responses.items import additional_tools, listed, messages
from broker.api.responses.store import ResponseStore, StoredItems, StoredResponse
from broker.api.responses.tools import offer
from broker.dialects.body import MetadataPairs, decode, encode, wrong
from protocol.errors import Code, RequestError

PREFIX = "conv_"
ITEMS_MAX = 20
"""Maximum items of one request."""
READS_MAX = 8
"""Maximum number of times that a conversation is read to change it, while others are changed."""

Document = dict[str, Any]


class CreateBody(Struct):
    """Body that creates a conversation."""

    items: Annotated[list[RawItem], Meta(max_length=ITEMS_MAX)] | None = None
    metadata: MetadataPairs | None = None


class UpdateBody(Struct):
    """Body that replaces the metadata of a conversation."""

    metadata: MetadataPairs


class ItemsBody(Struct):
    """Body that adds items to a conversation."""

    items: Annotated[list[RawItem], Meta(min_length=1, max_length=ITEMS_MAX)]


_create: msgspec.json.Decoder[CreateBody] = msgspec.json.Decoder(CreateBody)
_update: msgspec.json.Decoder[UpdateBody] = msgspec.json.Decoder(UpdateBody)
_items: msgspec.json.Decoder[ItemsBody] = msgspec.json.Decoder(ItemsBody)


def read_create(raw: bytes) -> CreateBody:
    """Decode and check a body, which may be empty. Raises `RequestError` naming the parameter at fault."""
    body = decode(_create, raw or b"{}")
    _check_items(body.items or ())
    return body


def read_update(raw: bytes) -> UpdateBody:
    """As `read_create`."""
    return decode(_update, raw)


def read_items(raw: bytes) -> ItemsBody:
    """As `read_create`."""
    body = decode(_items, raw)
    _check_items(body.items)
    return body


def _check_items(items: Sequence[Document]) -> None:
    placed = [(f"items[{index}]", item) for index, item in enumerate(items)]
    messages(placed)
    offer(additional_tools(placed), None, single=False)


class ConversationStore:
    """Conversations of all owners, in the store of responses. For use on the event loop."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def create(self, owner: str, stem: str, body: CreateBody, *, created_at: int) -> Document:
        """Store a new conversation and return its document.

        `stem`: random part of its id and of its items' ids. Raises `RequestError` if nothing is stored here.
        """
        if not self._store.keeps:
            message = "This server stores no responses and no conversations (--responses-max 0)."
            raise RequestError(Code.UNSUPPORTED_PARAMETER, message)
        document = {
            "id": PREFIX + stem,
            "object": "conversation",
            "created_at": created_at,
            "metadata": body.metadata or {},
        }
        pieces = (StoredItems.of(listed(body.items, stem)),) if body.items else ()
        self._put(owner, document, pieces)
        return document

    async def get(self, owner: str, id: str) -> StoredResponse:
        """Return a stored conversation. Raises `RequestError(conversation_not_found)`."""
        if not id.startswith(PREFIX):
            raise _unknown("Conversation", id)
        try:
            return await self._store.get(owner, id)
        except RequestError as error:
            raise _unknown("Conversation", id) if error.code is Code.RESPONSE_NOT_FOUND else error from None

    async def document(self, owner: str, id: str) -> Document:
        """Return the document of a conversation. Raises as `get`."""
        return (await self.get(owner, id)).head_document()

    async def update(self, owner: str, id: str, body: UpdateBody) -> Document:
        """Replace the metadata and return the document. Raises as `get`."""
        conversation = await self._read_latest(owner, id)
        document = conversation.head_document() | {"metadata": body.metadata}
        self._put(owner, document, conversation.pieces)
        return document

    async def delete(self, owner: str, id: str) -> None:
        """Delete a conversation; responses keep its items. Raises as `get`."""
        await self.get(owner, id)
        self._store.drop(owner, id)

    async def add(self, owner: str, id: str, items: Sequence[Document], stem: str) -> list[Document]:
        """Add items at the end and return them as listed. Raises as `get`."""
        await self.get(owner, id)
        added = listed(items, stem)
        self._store.extend(owner, id, (StoredItems.of(added),))
        return added

    async def item(self, owner: str, id: str, item_id: str) -> Document:
        """Return an item. Raises `RequestError(conversation_not_found)`."""
        for item in await self.items(owner, id):
            if item["id"] == item_id:
                return item
        raise _unknown("Item", item_id)

    async def items(self, owner: str, id: str) -> list[Document]:
        """Return all items, oldest first. Raises as `get`."""
        return [item for piece in (await self.get(owner, id)).pieces for item in piece.items()]

    async def delete_item(self, owner: str, id: str, item_id: str) -> Document:
        """Remove an item and return the conversation's document. Raises as `item`."""
        await self.item(owner, id, item_id)
        conversation = await self._read_latest(owner, id)
        pieces = tuple(_without(piece, item_id) for piece in conversation.pieces)
        document = conversation.head_document()
        self._put(owner, document, pieces)
        return document

    async def _read_latest(self, owner: str, id: str) -> StoredResponse:
        """Return a conversation to which nothing was added while it was read. Raises as `get`."""
        for _ in range(READS_MAX):
            changes = self._store.changes
            conversation = await self.get(owner, id)
            if self._store.changes == changes:
                break
        return conversation

    def _put(self, owner: str, document: Document, pieces: tuple[StoredItems, ...]) -> None:
        self._store.put(owner, document["id"], StoredResponse(encode(document), pieces))


def _without(piece: StoredItems, item_id: str) -> StoredItems:
    items = piece.items()
    left = [item for item in items if item["id"] != item_id]
    return piece if len(left) == len(items) else StoredItems.of(left)


def _unknown(what: str, id: str) -> RequestError:
    message = f"{what} with id {id[:128]!r} not found: it is not stored, or no longer."
    return RequestError(Code.CONVERSATION_NOT_FOUND, message)


# --- Pagination of the input items of a response -----------------------------------------------------

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
