"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API.

Versions and betas that clients name, in headers or in the query, have no effect.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.api.messages import body, request
from broker.api.messages.conversation import conversation
from broker.api.rendering import MessageRendering
from broker.api.tokens.tokens import TokenizeRenderer
from broker.dialects.normalize import Conversation
from broker.dispatch.fleet import Target
from broker.middleware.context import context_of
from broker.requests import streams
from broker.requests.generation import ask, generated, respond, take_body
from broker.requests.idempotency import keyed
from broker.state import gateway_of


async def create_message(http: Request) -> ASGIApp:
    """Generate the next message of a conversation, streamed or as one document."""
    gateway, context = gateway_of(http), context_of(http)
    read, raw = await take_body(http, body.read)
    target = gateway.dispatcher.choose(read.model, read.adapter)
    id = "msg_" + secrets.token_hex(12)
    thinks = target.capabilities.thinking
    generate = partial(
        request.generate, read, id=id, incarnation=gateway.dispatcher.incarnation, thinks=thinks
    )
    asked, frames = await ask(gateway, context, target, len(raw), _converse(read, target), generate)
    rendering = MessageRendering(
        id=id,
        model=target.name,
        created=int(time.time()),
        stream=bool(read.stream),
        request_id=context.id,
    )
    return generated(http, target, [asked], frames, rendering)


async def count_tokens(http: Request) -> ASGIApp:
    """Count the tokens of a conversation, even beyond the model's context. Nothing is generated."""
    gateway, context = gateway_of(http), context_of(http)
    read, raw = await take_body(http, body.read_prompt)
    target = gateway.dispatcher.choose(read.model)
    id = "count-" + secrets.token_hex(12)
    count = partial(request.count, read, id=id, incarnation=gateway.dispatcher.incarnation)
    asked, frames = await ask(gateway, context, target, len(raw), _converse(read, target), count)
    renderer = TokenizeRenderer(lambda accepted: {"input_tokens": accepted.prompt_tokens})
    return respond(http, target, [asked], frames, renderer, prompts=1)


def _converse(read: body.Prompt, target: Target) -> Callable[[], Conversation]:
    return partial(conversation, read, system_in_place=target.capabilities.system_in_place)


ROUTES = [
    Route("/v1/messages", keyed(create_message), methods=["POST"]),
    streams.route("/v1/messages", "msg_"),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
