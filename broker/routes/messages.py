"""POST /v1/messages: Anthropic's API; and /v1/messages/count_tokens.

What its clients say of versions and betas, in headers and in the query, changes nothing here.
"""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.dialects.messages import body, request
from broker.dialects.messages.answer import Stream, Whole, message
from broker.dialects.messages.conversation import conversation
from broker.dialects.tokens import Counted
from broker.http.boarding import check_room
from broker.http.ids import request_id
from broker.http.respond import Renderer, read_body
from broker.routes.gateway import gateway_of
from broker.routes.generation import read_images, respond


async def create_message(http: Request) -> ASGIApp:
    """A conversation's next message, streamed or whole."""
    gateway = gateway_of(http)
    check_room(gateway.dispatcher)
    read = body.read(await read_body(http, gateway.settings.body_bytes_max))
    found = gateway.dispatcher.find(read.model)
    spoken = conversation(read, system_in_place=found.capabilities.system_in_place)
    media, frames = read_images(spoken.images, found, gateway.settings.media_bytes_max)
    id = "msg_" + secrets.token_hex(12)
    asked = request.generate(
        read,
        spoken.messages,
        media,
        id=id,
        incarnation=gateway.dispatcher.incarnation,
        thinks=found.capabilities.thinking,
    )
    begun = message(id, found.model)
    renderer: Renderer = Stream(begun, request_id(http.scope)) if read.stream else Whole(begun)
    return respond(http, found, [asked], frames, renderer, prompts=1)


async def count_tokens(http: Request) -> ASGIApp:
    """How many tokens a conversation has, which may be longer than the model takes. Nothing is run."""
    gateway = gateway_of(http)
    check_room(gateway.dispatcher)
    read = body.read_prompt(await read_body(http, gateway.settings.body_bytes_max))
    found = gateway.dispatcher.find(read.model)
    spoken = conversation(read, system_in_place=found.capabilities.system_in_place)
    media, frames = read_images(spoken.images, found, gateway.settings.media_bytes_max)
    id = "count-" + secrets.token_hex(12)
    asked = request.count(read, spoken.messages, media, id=id, incarnation=gateway.dispatcher.incarnation)
    renderer = Counted(lambda told: {"input_tokens": told.prompt_tokens})
    return respond(http, found, [asked], frames, renderer, prompts=1)


ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
