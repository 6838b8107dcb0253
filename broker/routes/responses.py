"""POST /v1/responses; GET and DELETE of a response, its input items, and its cancellation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from broker.dialects.body import encode, refuse
from broker.dialects.normalize import Conversation
from broker.dialects.responses import body, history, listing, request
from broker.dialects.responses.answer import (
    Document,
    ResponseBuilder,
    ResponseDocumentRenderer,
    ResponseSseRenderer,
)
from broker.dialects.responses.history import ConversationHistory
from broker.dialects.responses.items import listed
from broker.dialects.responses.output import ResponseOutput
from broker.dialects.responses.store import StoredItems, StoredResponse
from broker.dispatch.fleet import UnloadedModel, Worker
from broker.routes.generation import ask, respond, take_body
from broker.routes.state import GatewayState, gateway_of
from protocol.api_keys import ApiKey
from protocol.errors import Code, RequestError


async def create(asked: Request) -> ASGIApp:
    """Generate the output for a conversation's items, streamed or as one document."""
    gateway, owner = gateway_of(asked), _owner(asked)
    read, raw = await take_body(asked, body.read)
    found = gateway.dispatcher.find(read.model)
    bytes_max = gateway.settings.body_bytes_max
    recalled = history.recall(read, gateway.responses, owner, bytes_max=bytes_max)
    offer = request.offered(read)
    stem = secrets.token_hex(12)
    id = history.response_id(stem)
    message, frames = await ask(
        asked,
        found,
        len(raw) + recalled.bytes_before,
        partial(_conversation, read, found, recalled),
        partial(request.generate, read, offer, id=id, incarnation=gateway.dispatcher.incarnation),
    )
    keep = None if read.store is False else _keeping(gateway, owner, id, recalled, stem)
    answer = ResponseBuilder(
        request.envelope(read, id=id, model=found.model, created_at=int(time.time()), kept=keep is not None),
        ResponseOutput(stem, request.style(read, offer)),
        clock=time.time,
        keep=keep,
    )
    renderer = ResponseSseRenderer(answer) if read.stream else ResponseDocumentRenderer(answer)
    response = respond(asked, found, [message], frames, renderer, prompts=1)
    return _running(gateway.answering, (owner, id), answer, response)


def _conversation(
    read: body.Body, found: Worker | UnloadedModel, recalled: ConversationHistory
) -> Conversation:
    in_place = found.capabilities.system_in_place
    return request.conversation(read, recalled.placed(), system_in_place=in_place)


def _owner(asked: Request) -> bytes:
    """Return the owner of responses: the request's key. Without keys there is only one owner."""
    key: ApiKey | None = getattr(asked.state, "key", None)
    return key.digest if key else b""


def _keeping(
    gateway: GatewayState, owner: bytes, id: str, recalled: ConversationHistory, stem: str
) -> Callable[[Document], None] | None:
    """Return the function that stores the response; None if nothing is stored."""
    store = gateway.responses
    if not store.keeps:
        return None
    before = (*recalled.before, StoredItems.of(listed(recalled.items, stem)))
    return lambda document: store.put(owner, id, StoredResponse.of(document, before))


def _running(
    answering: dict[tuple[bytes, str], ResponseBuilder],
    name: tuple[bytes, str],
    answer: ResponseBuilder,
    response: ASGIApp,
) -> ASGIApp:
    """Register the response in `answering` while it runs."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answering[name] = answer
        try:
            await response(scope, receive, send)
        finally:
            del answering[name]

    return app


# --- by its id ---------------------------------------------------------------------------------------


async def one(asked: Request) -> Response:
    """Return the response, complete or as far as it is, or delete it."""
    gateway, name = gateway_of(asked), _name(asked)
    if asked.method == "DELETE":
        gateway.responses.delete(*name)
        return _json({"id": name[1], "object": "response", "deleted": True})
    if asked.query_params.get("stream") == "true":
        raise refuse("stream", "must be false here: a finished response cannot be streamed again")
    if (running := gateway.answering.get(name)) is not None:
        return _json(running.so_far())
    return _json(gateway.responses.get(*name).document())


async def input_items(asked: Request) -> Response:
    """Return one page of the response's input items."""
    kept = gateway_of(asked).responses.get(*_name(asked))
    return _json(listing.page(kept.input(), asked.query_params))


async def cancel(asked: Request) -> Response:
    """End the response with its current output. Cancelling a finished one is an error, as in OpenAI's API."""
    gateway, name = gateway_of(asked), _name(asked)
    if (running := gateway.answering.get(name)) is None:
        gateway.responses.get(*name)
        raise RequestError(Code.INVALID_REQUEST, "This response has ended and cannot be cancelled.")
    document = running.cancel()
    for flight in gateway.dispatcher.flights:
        if flight.id == name[1]:
            flight.on_item()  # its reader checks, and finds that it is over
    return _json(document)


async def compact(asked: Request) -> Response:
    """Refuse to compact a conversation, which would otherwise look like an operation on a response."""
    message = (
        "POST /v1/responses/compact is not supported: this server does not summarize conversations. "
        "Ask the model for a summary, and send it as the 'input' of a new response."
    )
    raise RequestError(Code.ROUTE_NOT_FOUND, message)


def _name(asked: Request) -> tuple[bytes, str]:
    return _owner(asked), asked.path_params["id"]


def _json(document: dict[str, Any]) -> Response:
    return Response(encode(document), media_type="application/json")


ROUTES = [
    Route("/v1/responses", create, methods=["POST"]),
    Route("/v1/responses/compact", compact, methods=["POST"]),
    Route("/v1/responses/{id}", one, methods=["GET", "DELETE"]),
    Route("/v1/responses/{id}/input_items", input_items, methods=["GET"]),
    Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
]
