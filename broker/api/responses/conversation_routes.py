"""/v1/conversations: conversations that responses continue and extend, and their items."""

from __future__ import annotations

import secrets
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.api.responses import conversations
from broker.api.responses.conversations import ConversationStore
from broker.middleware.context import context_of
from broker.middleware.json_response import JsonResponse
from broker.requests.request_body import read_body
from broker.state import gateway_of


async def create(asked: Request) -> Response:
    """Create a conversation, with or without items."""
    body = conversations.read_create(await _raw(asked))
    stem, now = secrets.token_hex(12), int(time.time())
    return JsonResponse(_store(asked).create(context_of(asked).owner, stem, body, created_at=now))


async def one(asked: Request) -> Response:
    """Return a conversation, replace its metadata, or delete it."""
    store, (owner, id) = _store(asked), _name(asked)
    if asked.method == "DELETE":
        await store.delete(owner, id)
        return JsonResponse({"id": id, "object": "conversation.deleted", "deleted": True})
    if asked.method == "POST":
        await store.document(owner, id)  # unknown before unread
        return JsonResponse(await store.update(owner, id, conversations.read_update(await _raw(asked))))
    return JsonResponse(await store.document(owner, id))


async def items(asked: Request) -> Response:
    """Return one page of the items, or add items."""
    store, (owner, id) = _store(asked), _name(asked)
    if asked.method == "GET":
        return JsonResponse(conversations.page(await store.items(owner, id), asked.query_params))
    await store.document(owner, id)
    body = conversations.read_items(await _raw(asked))
    added = await store.add(owner, id, body.items, secrets.token_hex(12))
    return JsonResponse(conversations.page(added, {"order": "asc"}))


async def item(asked: Request) -> Response:
    """Return an item, or delete it."""
    store, (owner, id), item_id = _store(asked), _name(asked), asked.path_params["item_id"]
    if asked.method == "DELETE":
        return JsonResponse(await store.delete_item(owner, id, item_id))
    return JsonResponse(await store.item(owner, id, item_id))


async def _raw(asked: Request) -> bytes:
    return await read_body(asked, gateway_of(asked).settings.body_bytes_max)


def _store(asked: Request) -> ConversationStore:
    return ConversationStore(gateway_of(asked).responses)


def _name(asked: Request) -> tuple[str, str]:
    return context_of(asked).owner, asked.path_params["id"]


ROUTES = [
    Route("/v1/conversations", create, methods=["POST"]),
    Route("/v1/conversations/{id}", one, methods=["GET", "POST", "DELETE"]),
    Route("/v1/conversations/{id}/items", items, methods=["GET", "POST"]),
    Route("/v1/conversations/{id}/items/{item_id}", item, methods=["GET", "DELETE"]),
]
