"""POST /v1/messages: Anthropic's API; and /v1/messages/count_tokens.

What its clients say of versions and betas, in headers and in the query, changes nothing here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.dialects.messages import body, request
from broker.dialects.messages.answer import Stream, Whole, message
from broker.dialects.messages.conversation import conversation
from broker.dialects.normalize import Conversation
from broker.dialects.tokens import Counted
from broker.dispatch.fleet import Vacancy, Worker
from broker.http.ids import request_id
from broker.http.respond import Renderer
from broker.routes.gateway import gateway_of
from broker.routes.generation import ask, respond, take_body


async def create_message(http: Request) -> ASGIApp:
    """A conversation's next message, streamed or whole."""
    gateway = gateway_of(http)
    read, raw = await take_body(http, body.read)
    found = gateway.dispatcher.find(read.model)
    id = "msg_" + secrets.token_hex(12)
    thinks = found.capabilities.thinking
    generate = partial(
        request.generate, read, id=id, incarnation=gateway.dispatcher.incarnation, thinks=thinks
    )
    asked, frames = await ask(http, found, len(raw), _converse(read, found), generate)
    begun = message(id, found.model)
    renderer: Renderer = Stream(begun, request_id(http.scope)) if read.stream else Whole(begun)
    return respond(http, found, [asked], frames, renderer, prompts=1)


async def count_tokens(http: Request) -> ASGIApp:
    """How many tokens a conversation has, which may be longer than the model takes. Nothing is run."""
    gateway = gateway_of(http)
    read, raw = await take_body(http, body.read_prompt)
    found = gateway.dispatcher.find(read.model)
    id = "count-" + secrets.token_hex(12)
    count = partial(request.count, read, id=id, incarnation=gateway.dispatcher.incarnation)
    asked, frames = await ask(http, found, len(raw), _converse(read, found), count)
    renderer = Counted(lambda told: {"input_tokens": told.prompt_tokens})
    return respond(http, found, [asked], frames, renderer, prompts=1)


def _converse(read: body.Prompt, found: Worker | Vacancy) -> Callable[[], Conversation]:
    return partial(conversation, read, system_in_place=found.capabilities.system_in_place)


ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
