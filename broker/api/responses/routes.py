"""POST /v1/responses; GET and DELETE of a response, its input items, and its cancellation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.api.rendering import ResponseRendering
from broker.api.responses import body, compaction, conversations, history, request
from broker.api.responses.answer import ResponseBuilder
from broker.api.responses.items import Placed, listed
from broker.api.responses.output import ResponseOutput
from broker.api.responses.store import StoredItems, unknown
from broker.dialects.body import encode, refuse
from broker.dialects.normalize import Conversation
from broker.dispatch.fleet import Target
from broker.middleware.context import context_of
from broker.middleware.json_response import JsonResponse
from broker.requests import background
from broker.requests.durable import Described, clock_of, keeper
from broker.requests.generation import ask, respond, take_body
from broker.requests.idempotency import keyed
from broker.state import GatewayState, gateway_of
from protocol.errors import Code, RequestError


async def create(asked: Request) -> ASGIApp:
    """Generate the output for a conversation's items, streamed, as one document, or in the background."""
    gateway, context = gateway_of(asked), context_of(asked)
    owner = context.owner
    read, raw = await take_body(asked, body.read, may_wait=_names_background)
    if context.is_batch_line:
        read.store = False  # the batch has its result, and clients' responses keep their room
    target = gateway.dispatcher.choose(read.model, read.adapter)
    bytes_max = gateway.settings.body_bytes_max
    recalled = await history.recall(read, gateway.responses, owner, bytes_max=bytes_max)
    compacts = compaction.is_triggered(recalled)
    if compacts:
        recalled = compaction.untriggered(recalled)
    placed = compaction.placed(recalled) if compacts else recalled.placed()
    read = request.configured(read, placed)
    read = compaction.summarizing(read) if compacts else read
    offer = request.offered(read, () if compacts else placed)
    stem = secrets.token_hex(12)
    id = history.response_id(stem)
    message, frames = await ask(
        gateway,
        context,
        target,
        len(raw) + recalled.bytes_before,
        partial(_conversation, read, target, placed),
        partial(request.generate, read, offer, id=id, incarnation=gateway.dispatcher.incarnation),
    )
    created, kept = int(time.time()), _is_kept(gateway, read)
    if read.background and not kept:
        raise refuse("background", "is not possible: this server stores no responses")
    envelope = request.envelope(read, id=id, model=target.name, created_at=created, kept=kept)
    rendering = ResponseRendering(
        id=id,
        model=target.name,
        created=created,
        stream=bool(read.stream),
        stem=stem,
        envelope=encode(envelope),
        style=request.style(read, offer, compacts=compacts),
        background=bool(read.background),
    )
    before = (*recalled.before, StoredItems.of(listed(recalled.items, stem)))
    described = Described(rendering, before, keeps=kept, conversation=read.conversation_id)
    if read.background:
        return background.begin(asked, target, message, frames, rendering, described, len(raw))
    builder = rendering.builder(clock_of(context.answer), keeper(gateway, owner, described))
    response = respond(
        asked, target, [message], frames, rendering.of(builder), prompts=1, described=described
    )
    background.register(gateway, (owner, id), response.answer, builder)
    return response


def _names_background(raw: bytes) -> bool:
    """Return whether a body may ask for a response in the background, which waits if the server is full."""
    return b'"background"' in raw


async def compact(asked: Request) -> ASGIApp:
    """Summarize a conversation: return its user messages and a compaction item that stands for the rest."""
    gateway, context = gateway_of(asked), context_of(asked)
    read, raw = await take_body(asked, compaction.read)
    target = gateway.dispatcher.choose(read.model, read.adapter)
    recalled = await history.recall(
        read, gateway.responses, context.owner, bytes_max=gateway.settings.body_bytes_max
    )
    stem, offer = secrets.token_hex(12), request.offered(read, ())
    id = history.response_id(stem)
    message, frames = await ask(
        gateway,
        context,
        target,
        len(raw) + recalled.bytes_before,
        partial(_conversation, read, target, compaction.placed(recalled)),
        partial(request.generate, read, offer, id=id, incarnation=gateway.dispatcher.incarnation),
    )
    envelope = request.envelope(read, id=id, model=target.name, created_at=int(time.time()), kept=False)
    answer = ResponseBuilder(
        envelope, ResponseOutput(stem, request.style(read, offer, compacts=True)), clock=time.time
    )
    renderer = compaction.CompactionRenderer(answer, recalled, stem)
    return respond(asked, target, [message], frames, renderer, prompts=1)


def _conversation(read: body.Body, target: Target, placed: Sequence[Placed]) -> Conversation:
    in_place = target.capabilities.system_in_place
    return request.conversation(read, placed, system_in_place=in_place)


def _is_kept(gateway: GatewayState, read: body.Body) -> bool:
    return gateway.responses.keeps and read.store is not False


# --- by its id ---------------------------------------------------------------------------------------


async def one(asked: Request) -> ASGIApp:
    """Return the response, complete or as far as it is, or its events, or delete it."""
    gateway, name = gateway_of(asked), _name(asked)
    running = gateway.answering.get(name)
    if asked.method == "DELETE":
        if running is not None and gateway.answers.find(*name) is not None:
            running.cancel()
        await gateway.responses.delete(*name)
        background.forget(gateway, name)
        return _json({"id": name[1], "object": "response", "deleted": True})
    if asked.query_params.get("stream") == "true":
        return await background.events(gateway, name, asked.query_params.get("starting_after"))
    if running is not None:
        return _json(running.so_far())
    return _json((await gateway.responses.get(*name)).document())


async def input_items(asked: Request) -> Response:
    """Return one page of the response's input items."""
    gateway, name = gateway_of(asked), _name(asked)
    answer = gateway.answers.find(*name)
    if answer is not None and answer.inputs is not None:
        return _json(conversations.page(answer.inputs(), asked.query_params))
    return _json(conversations.page((await gateway.responses.get(*name)).input(), asked.query_params))


async def cancel(asked: Request) -> Response:
    """End the response with its current output. One in the background may be cancelled again; cancelling
    another one that has ended is an error, as in OpenAI's API."""
    gateway, name = gateway_of(asked), _name(asked)
    if (running := gateway.answering.get(name)) is None:
        document = (await gateway.responses.get(*name)).document()
        if not document["background"]:
            raise RequestError(Code.INVALID_REQUEST, "This response has ended and cannot be cancelled.")
        return _json(document)
    return _json(running.cancel())


def _name(asked: Request) -> tuple[str, str]:
    """Return the owner and id of a response. Raises `RequestError` for another kind of id."""
    id = asked.path_params["id"]
    if id.startswith(conversations.PREFIX):
        raise unknown(id)
    return context_of(asked).owner, id


def _json(document: dict[str, Any]) -> Response:
    return JsonResponse(document)


ROUTES = [
    Route("/v1/responses", keyed(create), methods=["POST"]),
    Route("/v1/responses/compact", compact, methods=["POST"]),
    Route("/v1/responses/{id}", one, methods=["GET", "DELETE"]),
    Route("/v1/responses/{id}/input_items", input_items, methods=["GET"]),
    Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
]
