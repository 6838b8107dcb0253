"""POST /v1/messages: Anthropic's API; and /v1/messages/count_tokens.

What its clients say of versions and betas, in headers and in the query, changes nothing here.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.dialects.messages import body, request
from broker.dialects.messages.answer import Stream, Whole, message
from broker.dialects.messages.conversation import conversation
from broker.dialects.tokens import Counted
from broker.dispatch.fleet import Vacancy, Worker
from broker.http.ids import request_id
from broker.http.respond import Renderer
from broker.routes.gateway import Gateway, gateway_of
from broker.routes.generation import read_images, respond, take_body
from protocol.messages import Generate
from protocol.parts import Media


async def create_message(http: Request) -> ASGIApp:
    """A conversation's next message, streamed or whole."""
    gateway = gateway_of(http)
    read, raw = await take_body(http, body.read)
    found = gateway.dispatcher.find(read.model)
    id = "msg_" + secrets.token_hex(12)
    asked, frames = await gateway.aside.work(len(raw), partial(_asked, gateway, read, found, id))
    begun = message(id, found.model)
    renderer: Renderer = Stream(begun, request_id(http.scope)) if read.stream else Whole(begun)
    return respond(http, found, [asked], frames, renderer, prompts=1)


async def count_tokens(http: Request) -> ASGIApp:
    """How many tokens a conversation has, which may be longer than the model takes. Nothing is run."""
    gateway = gateway_of(http)
    read, raw = await take_body(http, body.read_prompt)
    found = gateway.dispatcher.find(read.model)
    asked, frames = await gateway.aside.work(len(raw), partial(_counted, gateway, read, found))
    renderer = Counted(lambda told: {"input_tokens": told.prompt_tokens})
    return respond(http, found, [asked], frames, renderer, prompts=1)


def _asked(
    gateway: Gateway, read: body.Body, found: Worker | Vacancy, id: str
) -> tuple[Generate, list[bytes]]:
    """The request, and its images. Raises `RequestError`."""
    spoken, media, frames = _spoken(gateway, read, found)
    incarnation, thinks = gateway.dispatcher.incarnation, found.capabilities.thinking
    return request.generate(read, spoken, media, id=id, incarnation=incarnation, thinks=thinks), frames


def _counted(gateway: Gateway, read: body.Prompt, found: Worker | Vacancy) -> tuple[Generate, list[bytes]]:
    spoken, media, frames = _spoken(gateway, read, found)
    id = "count-" + secrets.token_hex(12)
    return request.count(read, spoken, media, id=id, incarnation=gateway.dispatcher.incarnation), frames


def _spoken(
    gateway: Gateway, read: body.Prompt, found: Worker | Vacancy
) -> tuple[list[dict[str, Any]], list[Media], list[bytes]]:
    """The canonical messages; what is said of each image, and its bytes."""
    spoken = conversation(read, system_in_place=found.capabilities.system_in_place)
    return spoken.messages, *read_images(spoken.images, found, gateway.settings.media_bytes_max)


ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
